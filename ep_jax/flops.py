"""FLOPs of the model in closed form, device peaks, utilisation and parameter counts. Plain Python, no JAX.

Forward FLOPs of one token, each multiply-add as 2, with D model_dim, H latent_dim, F expert_hidden_dim, S sequence
length, q = num_heads * head_dim, kv = num_kv_heads * head_dim, per layer:

    attention projections   2 * (D*q + 2*D*kv + q*D)
    attention scores        2 * 2*q * keys            keys = mean number of keys a query sees, see `mean_keys`
    router                  2 * D*E
    latent projections      2 * 2*D*H                 0 where latent_dim = model_dim
    routed experts          2 * k * 3*H*F             the k experts chosen, not all E; SwiGLU has 3 matrices
    shared experts          2 * n * 3*D*Fs            n = num_shared_experts, Fs = shared_hidden_dim

and once, head: 2 * D*V. A training step costs 3 times the forward pass (backward: one product for the inputs' and one
for the weights' gradient). Not counted: embedding lookup, norms, softmax, rotary factors, recomputation (remat), empty
rows of capacity buffers, the shorter attention of packed documents (S is used as if one document filled the row).

MFU = tokens per second * training FLOPs per token / (devices * peak), with the valid tokens of the whole step over all
devices. It counts all k selected experts; `mfu_kept` takes off the share of dropped assignments.
"""

import dataclasses

from ep_jax.model.config import ModelConfig, RouterConfig

# Dense (no sparsity) bfloat16 or float16 tensor-core peak in FLOP/s by the name JAX gives in `device_kind`; the first
# entry contained in that name counts. float32 is None: what XLA uses for it (TF32 or not) depends on matmul precision.
PEAK_FLOPS = (
    ("GB200", 2.5e15),  # NVIDIA GB200 NVL72 data sheet: 360 PFLOP/s FP16/BF16 with sparsity on 72 GPUs = 5 / 2
    ("B200", 2.25e15),  # NVIDIA HGX B200 data sheet: 36 PFLOP/s FP16/BF16 with sparsity on 8 GPUs = 4.5 / 2
    ("H200 NVL", 0.8355e15),  # NVIDIA H200 data sheet, NVL column: 1671 TFLOP/s with sparsity / 2
    ("H200", 0.9895e15),  # NVIDIA H200 data sheet, SXM column: 1979 TFLOP/s with sparsity / 2
    ("H100 NVL", 0.8355e15),  # NVIDIA H100 data sheet, NVL column: 1671 TFLOP/s with sparsity / 2
    ("H100 PCIe", 0.7565e15),  # NVIDIA H100 PCIe product brief: 1513 TFLOP/s with sparsity / 2
    ("H100", 0.9895e15),  # NVIDIA H100 data sheet, SXM column: 1979 TFLOP/s with sparsity / 2
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flops:
    """Forward FLOPs per token, summed over layers, by part."""

    attention_projections: float
    attention_scores: float
    router: float
    latent_projections: float
    routed_experts: float
    shared_experts: float
    head: float

    @property
    def forward(self) -> float:
        """FLOPs of one token in the forward pass."""
        return sum(dataclasses.astuple(self))

    @property
    def training(self) -> float:
        """FLOPs of one token in forward and backward pass."""
        return 3 * self.forward

    @property
    def routed_share(self) -> float:
        """Part of all FLOPs that the routed experts do, 0 to 1."""
        return self.routed_experts / self.forward


def flops_per_token(model: ModelConfig, router: RouterConfig, sequence_length: int) -> Flops:
    """Model FLOPs of one token in a row of `sequence_length` tokens; the formula is in the module header."""
    layers, width = model.num_layers, model.model_dim
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    num_global = layers // model.global_every
    keys = num_global * mean_keys(sequence_length, 0) + (layers - num_global) * mean_keys(sequence_length, model.window)
    latent = 0 if model.latent_dim == width else 2 * width * model.latent_dim
    expert = 3 * model.latent_dim * model.expert_hidden_dim
    shared = model.num_shared_experts * 3 * width * model.shared_hidden_dim
    return Flops(
        attention_projections=layers * 2 * (2 * width * q + 2 * width * kv),
        attention_scores=2 * 2 * q * keys,
        router=layers * 2 * width * router.num_experts,
        latent_projections=layers * 2 * latent,
        routed_experts=layers * 2 * router.experts_per_token * expert,
        shared_experts=layers * 2 * shared,
        head=2 * width * model.vocab_size,
    )


def mean_keys(sequence_length: int, window: int) -> float:
    """Mean number of keys a query sees under a causal mask: S/2, or w - w*w/(2*S) with a window of w < S (0 = none).

    Half of the diagonal is counted, as in the usual causal half of S*S; both formulas agree at w = S.
    """
    width = min(window or sequence_length, sequence_length)
    return width - width * width / (2 * sequence_length)


def num_parameters(model: ModelConfig, router: RouterConfig) -> tuple[int, int]:
    """Trained parameters: (all, active); active leaves out the experts that a token does not choose."""
    width, latent = model.model_dim, model.latent_dim
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 2 * width * q + 2 * width * kv + 2 * model.head_dim  # with the norms of queries and keys
    latent_layers = 0 if latent == width else 2 * width * latent + latent  # down, up, and the norm of the routed rows
    shared = model.num_shared_experts * 3 * width * model.shared_hidden_dim
    norms = 2 * width  # before attention and before the MoE
    layer = attention + latent_layers + shared + norms + width * router.num_experts
    expert = 3 * latent * model.expert_hidden_dim
    tables = (1 if model.tie_embeddings else 2) * model.vocab_size * width
    fixed = tables + width + model.num_layers * layer  # width: the norm before the head
    experts = model.num_layers * expert
    return fixed + experts * router.num_experts, fixed + experts * router.experts_per_token


def device_peak_flops(device_kind: str, dtype: str) -> float | None:
    """Peak FLOP/s of one device without sparsity, or None where it is unknown (CPU, float32, other devices).

    Args:
      device_kind: `jax.Device.device_kind`, e.g. "NVIDIA H200".
      dtype: name of the matmul inputs' type, e.g. "bfloat16".
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((peak for name, peak in PEAK_FLOPS if name.lower() in device_kind.lower()), None)


def mfu(tokens_per_second: float, flops: Flops, peak_flops: float | None, num_devices: int) -> float | None:
    """Model FLOPs utilisation, 0 to 1, with all selected experts counted; None where the peak is unknown.

    Args:
      tokens_per_second: valid tokens of whole steps, over all devices.
      peak_flops: of one device, in FLOP/s.
    """
    if peak_flops is None:
        return None
    return tokens_per_second * flops.training / (num_devices * peak_flops)


def mfu_kept(utilisation: float | None, flops: Flops, drop_rate: float) -> float | None:
    """Utilisation without the dropped assignments: mfu * (1 - f*d), f = routed share of FLOPs, d = drop rate."""
    if utilisation is None:
        return None
    return utilisation * (1 - flops.routed_share * drop_rate)
