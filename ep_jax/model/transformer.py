"""The decoder: embedding, blocks of layers, final norm, head, and the losses of this device's batch rows.

`init_params` and `parameter_kinds` describe the parameters; `forward` runs inside one shard_map over all mesh axes, on
this device's parameter shards and batch rows, and returns sums that the caller adds over devices and microbatches.
This file does not differentiate, update or communicate, but for two small sums of counts.

Shapes: b sequences of this device, L tokens of a sequence, D model width, V vocabulary, E experts.
"""

import functools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ep_jax.mesh import BATCH_AXES
from ep_jax.model import balancing, flash, parameters
from ep_jax.model.attention import Attention
from ep_jax.model.config import ModelConfig, RouterConfig
from ep_jax.model.embedding import look_up
from ep_jax.model.latent_moe import LatentMoE, RoutedExperts
from ep_jax.model.loss import cross_entropy_sum, load_balance_sum
from ep_jax.model.norms import rms_norm
from ep_jax.model.parameters import gathered, norm_scale, weight
from ep_jax.model.router import RouterStats

if TYPE_CHECKING:
    from ep_jax.data.sequences import Batch

# Names that the protocol gives to what it sends, gets back and plans with; the policy "exchanges" keeps these alone.
EXCHANGE_NAMES = ("dispatched_rows", "returned_rows", "route_plan")
# Names that "products" keeps too: the experts' first products; where no row travels their inputs and summed results.
PRODUCT_NAMES = ("expert_hidden", "expert_input", "expert_output")


class Outputs(NamedTuple):
    """Losses and sums of this device's rows. Summed over devices and microbatches, the losses are means of the step."""

    cross_entropy: jax.Array  # float32 [], nats per valid target
    load_balance: jax.Array  # float32 [], mean over layers, 1.0 when balanced
    z_loss: jax.Array  # float32 [], mean over layers and valid tokens
    router: RouterStats | None  # each field with a leading layer axis; None where nobody needs it
    drops: Any  # what routed_experts reports, each leaf with a leading layer axis

    def objective(self, router: RouterConfig) -> jax.Array:
        """What training minimises: cross entropy plus the router losses times their coefficients."""
        balance = router.load_balance_coefficient * self.load_balance
        return self.cross_entropy + balance + router.z_loss_coefficient * self.z_loss


class Layer(nnx.Module):
    """Attention and MoE, each behind a norm and added to the residual stream."""

    def __init__(self, model: ModelConfig, router: RouterConfig, *, window: int, stack: tuple[int, ...]):
        self.epsilon = model.norm_epsilon
        self.attention_norm = norm_scale((*stack, model.model_dim))
        self.attention = Attention(model, window=window, stack=stack)
        self.moe_norm = norm_scale((*stack, model.model_dim))
        self.moe = LatentMoE(model, router, stack=stack)

    def __call__(self, x_bLD, bias_E, batch, valid_in_group, routed_experts):
        with jax.named_scope("attention"):
            normed = rms_norm(x_bLD, self.attention_norm[...], self.epsilon)
            x_bLD += self.attention(normed, batch.segments, batch.positions)
        normed = rms_norm(x_bLD, self.moe_norm[...], self.epsilon)
        added, stats, drops = self.moe(normed, bias_E, batch.valid, valid_in_group, routed_experts)
        return x_bLD + added, (stats, drops)


class Block(nnx.Module):
    """The unit of the scan: global_every layers, the last of which attends globally and the others in the window."""

    def __init__(self, model: ModelConfig, router: RouterConfig, *, stack: tuple[int, ...]):
        self.num_layers = model.global_every
        for i in range(self.num_layers):
            window = model.window if i < self.num_layers - 1 else 0
            setattr(self, f"layer_{i}", Layer(model, router, window=window, stack=stack))

    def __call__(self, x_bLD, bias_nE, inputs_n, batch, valid_in_group, routed_experts):
        """Returns activations, and per-layer (RouterStats, drops) with a leading axis of the block's layers."""
        reports = []
        for i in range(self.num_layers):
            layer, experts = getattr(self, f"layer_{i}"), routed_experts
            if inputs_n is not None:
                mine = jax.tree.map(operator.itemgetter(i), inputs_n)
                experts = functools.partial(routed_experts, layer_input=mine)
            x_bLD, report = layer(x_bLD, bias_nE[i], batch, valid_in_group, experts)
            reports.append(report)
        return x_bLD, jax.tree.map(lambda *layers: jnp.stack(layers), *reports)


class Ends(nnx.Module):
    """What comes before the blocks and after them."""

    def __init__(self, model: ModelConfig):
        self.embedding = weight("embedding", (model.vocab_size, model.model_dim), model.init_std)
        self.final_norm = norm_scale((model.model_dim,))
        if not model.tie_embeddings:
            self.head = weight("head", (model.model_dim, model.vocab_size), model.init_std)


class Transformer(Ends):
    """All parameters. Those of the blocks have a leading axis of num_blocks."""

    def __init__(self, model: ModelConfig, router: RouterConfig):
        super().__init__(model)
        self.blocks = Block(model, router, stack=(model.num_blocks,))


def parameter_kinds(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
    """The kind of every parameter ("embedding", "head", "dense", "expert", "router", "norm"), as a nested dict."""
    return parameters.kinds_of(Transformer(model, router))


def init_params(
    model: ModelConfig, router: RouterConfig, seed: int | jax.Array
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Float32 master weights and their kinds, nested dicts of the same structure.

    Weights are truncated normal with init_std; those that write to the residual stream (attention output, expert,
    shared and latent outputs) are 1/sqrt(2 num_layers) of that, the router's is 1/sqrt(model_dim), norms are one. The
    values do not depend on the mesh. To place them while they are made, jit
    `lambda seed: init_params(model, router, seed)[0]` with out_shardings.
    """
    module = Transformer(model, router)
    return parameters.initialize(module, seed), parameters.kinds_of(module)


def forward(
    params: dict[str, Any],
    router_bias: jax.Array,
    batch: "Batch",
    *,
    model: ModelConfig,
    router: RouterConfig,
    valid_total: jax.Array,
    routed_experts: RoutedExperts,
    layer_inputs: Any = None,
) -> Outputs:
    """Losses and sums of this device's batch rows; inside shard_map over the mesh axes, check_vma on.

    params: this device's shards, float32, or `split_blocks` of them. router_bias: float32 [num_layers, E]. batch:
    tokens, targets, segments, positions int32 [b, L], valid bool [b, L] (one microbatch). valid_total: float32 [],
    valid targets of the whole step over all devices and microbatches; 0 is taken as 1. The same on every mesh.
    layer_inputs: a tree of arrays [num_layers, ...], of which each layer hands its own part to routed_experts as
    `layer_input`; None when they take none.
    """
    blocks = split_blocks(params, model)["blocks"]
    module = nnx.merge(nnx.graphdef(Ends(model)), {name: param for name, param in params.items() if name != "blocks"})
    valid_total = jnp.maximum(valid_total, 1.0)
    valid_in_group = lax.psum(jnp.sum(batch.valid, dtype=jnp.int32), "ep")
    dtype = jnp.dtype(model.compute_dtype)

    embedding_VD = gathered(module.embedding, dtype)
    # In float32, so that the gradients of a frequent token add up in float32.
    x_bLD = look_up(embedding_VD.astype(jnp.float32), batch.tokens, dtype)
    graphdef = nnx.graphdef(Block(model, router, stack=()))

    def run_block(x_bLD, block_params, per_layer_n):
        return nnx.merge(graphdef, block_params)(x_bLD, *per_layer_n, batch, valid_in_group, routed_experts)

    x_bLD, (stats, drops) = _run_blocks(run_block, x_bLD, blocks, (router_bias, layer_inputs), model)
    x_bLD = rms_norm(x_bLD, module.final_norm[...], model.norm_epsilon)
    head_DV = embedding_VD.T if model.tie_embeddings else gathered(module.head, dtype)
    with jax.named_scope("loss"):
        cross_entropy = cross_entropy_sum(
            x_bLD.reshape(-1, model.model_dim),
            head_DV.astype(jnp.float32),  # its gradient is summed over chunks in this type
            batch.targets.reshape(-1),
            batch.valid.reshape(-1),
            model.loss_chunk_tokens,
        )
    balance_sums = jax.vmap(load_balance_sum)(lax.psum(stats.counts, BATCH_AXES), stats.probability_sum)
    return Outputs(
        cross_entropy=cross_entropy / valid_total,
        load_balance=jnp.mean(balance_sums) / valid_total,
        z_loss=jnp.mean(stats.z_sum) / valid_total,
        router=stats,
        drops=drops,
    )


def initial_router_state(model: ModelConfig, router: RouterConfig) -> dict[str, jax.Array]:
    """The router's part of the training state: {"bias": float32 zeros [num_layers, E]}."""
    return {"bias": balancing.initial_bias(model.num_layers, router.num_experts)}


def split_blocks(params: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Parameters with those of each block apart, a list in place of their leading axis; as they are with `model.scan`.

    Derivatives with respect to these can be added up block by block; those with respect to the whole are first put
    together. Parameters that are split already stay as they are.
    """
    if model.scan or isinstance(params["blocks"], list):
        return params
    blocks = [jax.tree.map(operator.itemgetter(n), params["blocks"]) for n in range(model.num_blocks)]
    return {**params, "blocks": blocks}


def join_blocks(params: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `split_blocks`."""
    if not isinstance(params["blocks"], list):
        return params
    return {**params, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["blocks"])}


def _run_blocks(run_block, x_bLD, blocks, per_layer, model):
    """Runs the blocks one after the other, in a loop if they are stacked.

    per_layer, and the reports that come back, have a leading axis of all layers.
    """
    run_block = remat(run_block, model.remat, in_loop=model.scan)
    by_block = (model.num_blocks, model.global_every)
    per_block = jax.tree.map(lambda leaf: leaf.reshape(*by_block, *leaf.shape[1:]), per_layer)
    if isinstance(blocks, list):
        by_number = []
        for n, block_params in enumerate(blocks):
            x_bLD, report = run_block(x_bLD, block_params, jax.tree.map(operator.itemgetter(n), per_block))
            by_number.append(report)
        reports = jax.tree.map(lambda *leaves: jnp.stack(leaves), *by_number)
    else:
        x_bLD, reports = lax.scan(lambda x, xs: run_block(x, *xs), x_bLD, (blocks, per_block))
    return x_bLD, jax.tree.map(lambda leaf: leaf.reshape(model.num_layers, *leaf.shape[2:]), reports)


def remat(block, policy: str, *, in_loop: bool):
    """Wraps a block so that its backward pass recomputes what the policy does not keep.

    "none" keeps everything, gathered weights included; "full" keeps the input of each block; "exchanges" keeps that
    and what crossed the network for the routed experts, so that no exchange is repeated; "products" keeps also the
    results of matrix products and of fused attention, so that of these only the scores of plain attention are
    repeated. Outside a loop XLA would see that a recomputed value is there already, and keep it: with "products", whose
    recomputed values are cheap, it may (measured on H200, experiments/LOG.md); with the others it is kept from that.
    """
    policies = jax.checkpoint_policies
    keeps = {
        "full": policies.nothing_saveable,
        "exchanges": policies.save_only_these_names(*EXCHANGE_NAMES),
        "products": policies.save_from_both_policies(
            _saves_products, policies.save_only_these_names(*EXCHANGE_NAMES, *PRODUCT_NAMES, flash.RESIDUAL_NAME)
        ),
    }
    if policy == "none":
        return block
    prevent_cse = not in_loop and policy != "products"
    return jax.checkpoint(block, policy=keeps[policy], prevent_cse=prevent_cse)


def _saves_products(primitive, *args, **params):
    """Products without batch axes, and cuDNN's attention, which is one primitive."""
    return "dot_product_attention_fwd" in primitive.name or jax.checkpoint_policies.dots_with_no_batch_dims_saveable(
        primitive, *args, **params
    )
