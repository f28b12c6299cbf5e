"""Bytes of one GPU: training state, gradients, activations under the remat policy, send and receive buffers.

Letters: T tokens of a GPU and microbatch, c bytes of the compute type, L tokens of a row, D model width, H routed
width, F expert hidden width, E experts, S ep shards, K choices, q / kv width of all query / key-value heads, U hidden
width of all shared experts, V vocabulary, W waves, n layers of a scanned block, B blocks.

State, exact: master weights float32 (4 bytes a parameter on the GPU), gradients float32 (4; 8 with accumulation, the
sum and the current ones), optimizer float32 (AdamW 8; Muon 4 for dense and expert matrices, 8 for the rest).
Published stacks count bfloat16 weights and gradients beside float32 masters and moments: 2 + 2 + 4 + 8 = 16 bytes for
AdamW, 2 + 2 + 4 + 4 = 12 for Muon; the sums happen to be equal, see `published_bytes_per_parameter`.

Activations of a layer, what its backward pass reads:

    attention   2*T*D*c + 3*T*q*c + 3*T*kv*c + scores    scores: with cudnn, which auto may take, the mask T*L*c;
                                                         with tokamax 2*T*heads*4; xla keeps probabilities
                                                         2*T*heads*L*4, or of one block of 512 queries where it can
    router      3*T*E*4
    latent      2*T*H*c + T*H*c                          rows before and after their norm; combined rows
    shared      3*T*U*c
    residual    2*T*D*c                                  normed input of the MoE, its output
    routed      W * (sent + received + experts + back + returned), experts = rows*(2*H + 3*F)*c; rows by `wave_rows`;
                float8 payloads have one byte an element in sent and received, their gradients c

Rows grouped by expert without fixed places (ragged, rowwise, ring, dense, receive = pool) go, in float32 or with
ep.kernels = xla, through `jax.lax.ragged_dot`, which XLA lowers to products over all experts of the wave:
experts*rows*(H + 3*F)*c more while one wave is worked on (`ragged_dot`). It is often the largest number of a plan.
Small experts go through `ep/blocks.py` instead: weights and rows of its blocks, twice with their gradients.

Remat keeps: none - all of it and the gathered weights of every layer; full - T*D*c a block; exchanges - that, and of
each layer what arrived by the two exchanges (received + returned; of rows that the experts have weighted their sum
alone, T*H*c, but for slots of tokens with ep.rescale) and the plan's integers; products - that, and the results of the
dense products, T*(q + 2*kv + 3*D + H + 2*U)*c and the router's, and the experts' rows*2*F*c; of unrolled layers also
SwiGLU's results, rows*F*c, and with slots of tokens rows*H*c instead of what arrived (seen by tools.compile of
pooled_wave, ragged, rowwise and dense, and taken for the same in the others). The backward pass of a block holds the n
layers of it once more (remat recomputes whole blocks), less what was kept, plus cotangents as large as the largest part
of one layer, plus `ragged_dot`.

Peak = state + gradients + the largest of
    backward    copies + kept + working set of a block + its gathered weights + the largest weight gradient,
                (c + 4) an element
    loss        copies + kept + 2*chunk*V*4 + 2*T*D*c + V*D*(c + 8)      logits and their gradient; head,
                                                               a float32 copy, its gradient
    optimizer   largest leaf, all blocks of it on the GPU, times 8 (AdamW) or 8 + 3*width of muon_dtype (Muon)

copies: with accumulation, the weights that the model uses in a narrower compute type alone, in that type.

Not here: what XLA fuses away or keeps on top, the rows at experts' ends that the kernel of their weights' gradients
copies, NCCL's and CUDA's own memory, fragmentation. Tests compare state with compiled programs exactly and temporaries
within a factor of 2; peaks measured on H200 lay 2 to 8 % below the plan, those that XLA allots for configs/h200.toml
on two GPUs 8 % below to 4 % above it, by transport.
"""

import dataclasses
from typing import NamedTuple

from ep_jax.config import RunConfig
from ep_jax.ep import blocks
from ep_jax.ep.agreed import Receivers
from ep_jax.ep.capacity import LayerShape, whole_rows
from ep_jax.ep.fixed_cell import FixedCell
from ep_jax.ep.payload import float8_header_rows, header_rows
from ep_jax.ep.pooled_tokens import pooled_transport
from ep_jax.ep.ragged import Ragged
from ep_jax.ep.rowwise import once_per_peer
from ep_jax.ep.settings import EPConfig
from ep_jax.model.attention import QUERY_BLOCK
from ep_jax.model.config import ModelConfig
from ep_jax.model.parameters import CAST_KINDS
from ep_jax.optimizer import MUON_KINDS
from ep_jax.planning.sizes import FLOAT32, INT32, ITEMSIZE, LAYER_KINDS, Parameter, Sizes

MEASURED_FACTOR = 2.0  # tests: temporaries of compiled programs lie within this factor of `Memory.temporaries`


class WaveRows(NamedTuple):
    """Rows of routed width in the buffers of one wave, headers included."""

    sent: int  # written by the sender for the exchange
    received: int  # what arrives
    experts: int  # what the experts compute on, filled or not
    back: int  # written for the exchange back
    returned: int  # what arrives from it
    kept_back: int  # of that, or summed of it, what the backward pass needs
    waves: int


@dataclasses.dataclass(frozen=True)
class State:
    """Bytes that live through the whole run on one GPU."""

    weights: int
    optimizer: int
    rest: int  # router bias, counts, random key

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.rest


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one GPU; peak = state + gradients + copies + kept + the largest phase."""

    state: State
    gradients: int
    copies: int  # weights in the compute type, while there are activations
    kept: int  # activations between the forward and the backward pass of a block
    backward: int
    loss: int
    optimizer_step: int
    layer: dict[str, int]  # activations of one layer by part
    kept_layer: int  # of `kept`, per layer
    ragged_dot: int  # of `backward`, for rows without fixed places
    wave: dict[str, int]  # buffers of one wave

    @property
    def temporaries(self) -> int:
        return self.gradients + max(self.copies + self.kept + max(self.backward, self.loss), self.optimizer_step)

    @property
    def peak(self) -> int:
        return self.state.total + self.temporaries


def memory(sizes: Sizes) -> Memory:
    """The memory of a training step."""
    layer = layer_activations(sizes)
    kept_layer = _kept_of_layer(sizes, layer)
    model = sizes.config.model
    return Memory(
        state=state(sizes),
        gradients=sizes.local_elements() * FLOAT32 * (1 if sizes.microbatches == 1 else 2),
        copies=sizes.local_elements(*CAST_KINDS) * sizes.itemsize if has_copies(sizes) else 0,
        kept=_kept(sizes, kept_layer),
        backward=_backward(sizes, layer, kept_layer),
        loss=_loss(sizes),
        optimizer_step=_optimizer_step(sizes),
        layer=layer,
        kept_layer=kept_layer + sizes.tokens * model.model_dim * sizes.itemsize // model.global_every,
        ragged_dot=ragged_dot(sizes),
        wave=wave_buffers(sizes),
    )


def has_copies(sizes: Sizes) -> bool:
    """Whether weights in the compute type outlive a microbatch."""
    return sizes.itemsize < FLOAT32 and sizes.microbatches > 1


def state(sizes: Sizes) -> State:
    """The training state, exact: arguments of the compiled step but for the batch."""
    config, muon = sizes.config, sizes.config.optimizer.name == "muon"
    moments = sum(
        p.copies * p.local_elements(config.mesh) * optimizer_bytes(p.kind, config.optimizer.name)
        for p in sizes.parameters
    )
    counts = 4 if muon else 2  # of Adam, of Muon, and of each one's schedule
    scalars = (counts + 1) * INT32 + 2 * INT32  # with the step; two words of random key
    bias = config.model.num_layers * config.router.num_experts * FLOAT32
    return State(sizes.local_elements() * FLOAT32, moments, bias + scalars)


def optimizer_bytes(kind: str, optimizer: str) -> int:
    """Optimizer state of a parameter in bytes: one float32 for Muon's matrices, two for what Adam updates."""
    return FLOAT32 if optimizer == "muon" and kind in MUON_KINDS else 2 * FLOAT32


def published_bytes_per_parameter(optimizer: str) -> int:
    """State of a matrix parameter as published stacks count it: bfloat16 weight and gradient, the rest float32."""
    return 2 + 2 + FLOAT32 + optimizer_bytes("dense", optimizer)


def bytes_per_parameter(optimizer: str) -> int:
    """State of a matrix parameter here: float32 master, float32 gradient, optimizer."""
    return FLOAT32 + FLOAT32 + optimizer_bytes("dense", optimizer)


def batch_bytes(sizes: Sizes) -> int:
    """The step's batch on one GPU: four int32 and one bool a token."""
    return sizes.microbatches * sizes.tokens * (4 * INT32 + 1)


def wave_rows(settings: EPConfig, shape: LayerShape, width: int) -> WaveRows:
    """Rows of every buffer of one wave by transport; `rowwise` as if written one-sided, without its emulation."""
    shards, tokens = shape.num_shards, shape.tokens
    if settings.transport == "pooled_wave":
        transport = pooled_transport(settings, shape)
        slots = transport.pool_rows
        of_float8 = settings.payload == "float8_e4m3"
        header = float8_header_rows(slots, width) if of_float8 else header_rows(slots, shape.local_experts, width)
        there = shards * (slots + (0 if settings.slots == "token" else header))
        back = shards * (slots + header_rows(slots, 2**transport.per_slot - 1, width))
        summed = settings.slots == "token" and not settings.rescale
        kept = -(-tokens // settings.waves) if summed else back
        return WaveRows(there, there, transport.held_rows, back, back, kept, settings.waves)
    if settings.transport == "fixed_cell":
        rows = shape.num_experts * FixedCell(settings, shape).cell_rows
        return WaveRows(rows, rows, rows, rows, rows, rows, settings.waves)
    if settings.transport == "dense":
        rows = whole_rows(shape.assignments)
        return WaveRows(0, 0, rows, 0, rows, tokens, 1)
    receivers = Receivers(settings, shape)
    held = receivers.rows(0)
    if settings.transport == "ring":
        return WaveRows(tokens, shards * tokens, held, shards * tokens, tokens, tokens, 1)
    if settings.transport == "ragged":
        here = Ragged(settings, shape).sender_rows()
        return WaveRows(here, held, held, held, here, here, receivers.waves)
    # What comes back is summed on its way: one row a token, of all waves together.
    summed = -(-tokens // receivers.waves)
    return WaveRows(0, held, held, held, summed, summed, receivers.waves)


def wave_buffers(sizes: Sizes, *, gradients: bool = False) -> dict[str, int]:
    """Bytes of one wave's buffers, and of the experts' work on it; or of the gradients of all that."""
    model = sizes.config.model
    rows = wave_rows(sizes.config.ep, sizes.shape, model.latent_dim)
    row_bytes = model.latent_dim * sizes.itemsize
    payload_row_bytes = row_bytes if gradients else _payload_row_bytes(sizes)
    return {
        "sent": rows.sent * payload_row_bytes,
        "received": rows.received * payload_row_bytes,
        "expert input": rows.experts * row_bytes,
        "expert hidden": rows.experts * 3 * model.expert_hidden_dim * sizes.itemsize,
        "expert output": rows.experts * row_bytes,
        "sent back": rows.back * row_bytes,
        "returned": rows.returned * row_bytes,
    }


def _payload_row_bytes(sizes: Sizes) -> int:
    """Bytes of a row on its way to its expert."""
    return sizes.config.model.latent_dim * (1 if sizes.config.ep.payload == "float8_e4m3" else sizes.itemsize)


def layer_activations(sizes: Sizes) -> dict[str, int]:
    """Bytes that the backward pass of one layer reads, by part; the formulas are in the module header."""
    model, T, c = sizes.config.model, sizes.tokens, sizes.itemsize
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    waves = wave_rows(sizes.config.ep, sizes.shape, model.latent_dim).waves
    return {
        "attention": T * c * (2 * model.model_dim + 3 * q + 3 * kv) + _scores(sizes),
        "router": 3 * T * sizes.config.router.num_experts * FLOAT32,
        "latent": 3 * T * model.latent_dim * c,
        "shared": 3 * T * model.num_shared_experts * model.shared_hidden_dim * c,
        "residual": 2 * T * model.model_dim * c,
        "routed": waves * sum(wave_buffers(sizes).values()),
    }


def fixed_places(settings: EPConfig) -> bool:
    """Whether each expert has a number of rows of its own, filled or not."""
    return settings.transport == "fixed_cell" or (settings.transport == "pooled_wave" and settings.receive == "expert")


def by_kernels(config: RunConfig) -> bool:
    """Whether kernels multiply rows by experts on the GPUs that are planned for."""
    return config.ep.kernels == "auto" and config.model.compute_dtype == "bfloat16"


def ragged_dot(sizes: Sizes) -> int:
    """Bytes that the grouped products of one wave take besides their rows, where XLA computes them."""
    settings, shape, model = sizes.config.ep, sizes.shape, sizes.config.model
    if fixed_places(settings) or by_kernels(sizes.config):
        return 0
    experts = {"dense": shape.num_experts, "pooled_wave": shape.local_experts}.get(settings.transport)
    if experts is None:
        experts = Receivers(settings, shape).group
    rows = wave_rows(settings, shape, model.latent_dim).experts
    width, hidden = model.latent_dim, model.expert_hidden_dim
    if blocks.worthwhile(rows, experts, width, 2 * hidden):
        of_block = 3 * width * hidden + blocks.block_rows(rows, experts) * (2 * width + 3 * hidden)
        return 2 * blocks.num_blocks(rows, experts) * of_block * sizes.itemsize
    return experts * rows * (width + 3 * hidden) * sizes.itemsize


def fused_attention(model: ModelConfig) -> bool:
    """Whether attention on a GPU keeps no probabilities."""
    fits = model.head_dim % 8 == 0 and model.head_dim <= 128 and model.compute_dtype == "bfloat16"
    return model.attention in ("cudnn", "tokamax") or (model.attention == "auto" and fits)


def _scores(sizes: Sizes) -> int:
    model, length = sizes.config.model, sizes.config.data.sequence_length
    if model.attention == "tokamax":
        return 2 * sizes.tokens * model.num_heads * FLOAT32
    if fused_attention(model):
        return sizes.tokens * length * sizes.itemsize
    if length <= QUERY_BLOCK or length % QUERY_BLOCK:
        return 2 * sizes.tokens * model.num_heads * length * FLOAT32
    return 2 * sizes.tokens // length * QUERY_BLOCK * model.num_heads * length * FLOAT32


def _kept_of_layer(sizes: Sizes, layer: dict[str, int]) -> int:
    """Bytes of one layer kept between the passes, without the input of its block."""
    policy = sizes.config.model.remat
    if policy == "none":
        return sum(layer.values()) + _gathered_weights(sizes)
    if policy == "full":
        return 0
    rows = wave_rows(sizes.config.ep, sizes.shape, sizes.config.model.latent_dim)
    row_bytes = sizes.config.model.latent_dim * sizes.itemsize
    exchanged = rows.received * _payload_row_bytes(sizes) + rows.kept_back * row_bytes
    if sizes.config.ep.transport == "dense":  # nothing travels; the experts' inputs, and the sum
        exchanged = (rows.experts + rows.kept_back) * row_bytes if policy == "products" else 0
    if policy == "products" and not sizes.config.model.scan:
        # Outside a loop XLA merges what is computed again with the first time: SwiGLU's results, and the experts' rows
        # where slots hold tokens, of which less arrived.
        exchanged += rows.experts * sizes.config.model.expert_hidden_dim * sizes.itemsize
        if sizes.config.ep.transport == "pooled_wave" and sizes.config.ep.slots == "token":
            exchanged += (rows.experts - rows.received) * row_bytes
    plan = sizes.shape.assignments + rows.waves * (2 * rows.sent + rows.received + rows.experts)
    if sizes.config.ep.transport == "rowwise" and once_per_peer(sizes.shape, sizes.shape.local_experts):
        peers = sizes.shape.num_shards - 1  # the maps of rows that cross once: what to send, copy, sum here and add up
        plan += sizes.shape.assignments * (2 + peers) + sizes.tokens * peers + rows.waves * rows.received
    kept = rows.waves * exchanged + plan * INT32
    return kept + (_products(sizes, rows) if policy == "products" else 0)


def _products(sizes: Sizes, rows: WaveRows) -> int:
    """Bytes of one layer's matrix products whose results the remat policy "products" keeps."""
    model, router = sizes.config.model, sizes.config.router
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    latent = model.latent_dim + model.model_dim if model.has_latent else 0
    shared = model.num_shared_experts * 2 * model.shared_hidden_dim + (
        model.model_dim if model.num_shared_experts else 0
    )
    dense = sizes.tokens * (q + 2 * kv + model.model_dim + latent + shared) * sizes.itemsize
    experts = rows.waves * rows.experts * 2 * model.expert_hidden_dim * sizes.itemsize
    if fused_attention(model):  # its results and statistics
        dense += sizes.tokens * (q * sizes.itemsize + 2 * model.num_heads * FLOAT32)
    return dense + sizes.tokens * router.num_experts * FLOAT32 + experts


def _kept(sizes: Sizes, kept_layer: int) -> int:
    model = sizes.config.model
    return model.num_blocks * sizes.tokens * model.model_dim * sizes.itemsize + model.num_layers * kept_layer


def _backward(sizes: Sizes, layer: dict[str, int], kept_layer: int) -> int:
    """Working set of one block's backward pass beside what was kept."""
    model = sizes.config.model
    cotangents = max(layer["attention"], sum(wave_buffers(sizes, gradients=True).values()), layer["shared"])
    gradient = max(_gathered(sizes, p) for p in sizes.parameters if p.kind in LAYER_KINDS)
    gradient = gradient * (sizes.itemsize + FLOAT32) + ragged_dot(sizes)
    if model.remat == "none":
        return cotangents + gradient
    again = max(0, sum(layer.values()) - kept_layer) + _gathered_weights(sizes)
    return model.global_every * again + cotangents + gradient


def _gathered(sizes: Sizes, p: Parameter) -> int:
    """Elements of a parameter as the matmul reads it; under `dense` the experts of all ep shards."""
    everywhere = sizes.config.mesh.ep if p.routed and sizes.config.ep.transport == "dense" else 1
    return p.gathered_elements(sizes.config.mesh) * everywhere


def gathered_layer_elements(sizes: Sizes, *, routed: bool) -> int:
    """Elements of one layer's weights, routed or dense, that a GPU holds while it computes the layer."""
    layered = [p for p in sizes.parameters if p.kind in LAYER_KINDS and p.routed == routed]
    return sum(_gathered(sizes, p) for p in layered)


def _gathered_weights(sizes: Sizes) -> int:
    elements = gathered_layer_elements(sizes, routed=True) + gathered_layer_elements(sizes, routed=False)
    return elements * sizes.itemsize


def _loss(sizes: Sizes) -> int:
    model = sizes.config.model
    chunk = min(model.loss_chunk_tokens or sizes.tokens, sizes.tokens)
    head = model.vocab_size * model.model_dim * (sizes.itemsize + 2 * FLOAT32)
    return 2 * chunk * model.vocab_size * FLOAT32 + 2 * sizes.tokens * model.model_dim * sizes.itemsize + head


def _optimizer_step(sizes: Sizes) -> int:
    config = sizes.config
    leaf = max(p.local_elements(config.mesh) * -(-p.copies // config.model.global_every) for p in sizes.parameters)
    work = 2 * FLOAT32
    if config.optimizer.name == "muon":
        work += 3 * ITEMSIZE[config.optimizer.muon_dtype]
    return leaf * work
