"""Sizes and numerics of the transformer, and the router's settings."""

import dataclasses
from typing import ClassVar

from ep_jax.fields import ConfigError, check, setting

REMAT_POLICIES = ("none", "products", "exchanges", "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of identical blocks: attention, then a LatentMoE layer with shared experts."""

    SECTION: ClassVar[str] = "model"

    vocab_size: int = setting(259, at_least=2, doc="token ids run from 0 to this; bytes need 256 + 3 specials")
    num_layers: int = setting(4, at_least=1, doc="transformer layers, each with attention and an MoE")
    model_dim: int = setting(128, at_least=2, doc="width of the residual stream")
    num_heads: int = setting(4, at_least=1, doc="query heads")
    num_kv_heads: int = setting(2, at_least=1, doc="key and value heads; divides num_heads")
    head_dim: int = setting(32, at_least=2, doc="width of one head, even")
    window: int = setting(0, at_least=0, unit="tokens", doc="sliding attention window of local layers; 0 = none")
    global_every: int = setting(
        1, at_least=1, doc="every n-th layer attends globally (1 = all); layers are scanned n at a time"
    )
    rope_theta: float = setting(10_000.0, above=0.0, doc="base of the rotary position frequencies")
    norm_epsilon: float = setting(1e-6, above=0.0, doc="added to mean squares in RMSNorm")
    latent_dim: int = setting(64, at_least=1, doc="routed width; equal to model_dim switches the projection off")
    expert_hidden_dim: int = setting(128, at_least=1, doc="hidden width of one routed expert (SwiGLU)")
    num_shared_experts: int = setting(1, at_least=0, doc="experts that every token passes, at full width")
    shared_hidden_dim: int = setting(128, at_least=1, doc="hidden width of one shared expert")
    tie_embeddings: bool = setting(False, doc="use the embedding as the output head too")
    init_std: float = setting(0.02, above=0.0, doc="standard deviation of truncated-normal weights")
    compute_dtype: str = setting(
        "float32", doc="matmul inputs and activations; master weights stay float32", choices=("float32", "bfloat16")
    )
    remat: str = setting(
        "none",
        doc="what the backward pass recomputes: nothing; all but matrix products and exchanged rows; all but exchanged "
        "rows; all of a block",
        choices=REMAT_POLICIES,
    )
    scan: bool = setting(
        True,
        doc="blocks run in a loop: the program stays small; without it kept activations are not copied in and out of "
        "stacks of all blocks, for a longer compilation",
    )
    attention: str = setting(
        "auto",
        doc="attention kernel; auto = in bfloat16 tokamax on Hopper GPUs, cudnn on others, else xla",
        choices=("auto", "xla", "cudnn", "tokamax"),
    )
    loss_chunk_tokens: int = setting(
        0, at_least=0, unit="tokens", doc="logits are computed this many tokens at a time; 0 = all at once"
    )

    def __post_init__(self):
        check(self)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_kv_heads = {self.num_kv_heads}: must divide model.num_heads = {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim = {self.head_dim}: must be even (rotary pairs)")
        if self.num_layers % self.global_every:
            raise ConfigError(
                f"model.global_every = {self.global_every}: must divide model.num_layers = {self.num_layers}"
            )
        if self.latent_dim > self.model_dim:
            raise ConfigError(f"model.latent_dim = {self.latent_dim}: at most model.model_dim = {self.model_dim}")
        if self.window and self.global_every == 1:
            raise ConfigError(
                f"model.window = {self.window}: unused with model.global_every = 1, where every layer is global; "
                f"allowed is 0, or model.global_every of at least 2"
            )
        if self.attention in ("cudnn", "tokamax") and self.compute_dtype != "bfloat16":
            raise ConfigError(
                f"model.attention = {self.attention!r}: needs model.compute_dtype bfloat16, got {self.compute_dtype}; "
                f"allowed here is auto or xla"
            )

    @property
    def num_blocks(self) -> int:
        """Scan length: blocks of `global_every` layers."""
        return self.num_layers // self.global_every

    @property
    def has_latent(self) -> bool:
        """Whether routed rows are projected to a narrower width."""
        return self.latent_dim != self.model_dim

    @property
    def residual_scale(self) -> float:
        """What weights that write to the residual stream start smaller by: 2 such writes a layer add up to one."""
        return (2 * self.num_layers) ** -0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How tokens choose experts and how the load is kept balanced (DESIGN 4b)."""

    SECTION: ClassVar[str] = "router"

    num_experts: int = setting(16, at_least=1, doc="routed experts of a layer, over all shards")
    experts_per_token: int = setting(2, at_least=1, doc="choices of a token (top-k)")
    scores: str = setting("sigmoid", doc="scores from logits", choices=("sigmoid", "softmax"))
    balancing: str = setting(
        "quantile", doc="bias added to scores for the choice only", choices=("quantile", "sign_bias", "none")
    )
    weight_sum: float = setting(1.0, above=0.0, doc="a token's combine weights are scaled to this sum")
    histogram_bins: int = setting(4096, at_least=16, doc="bins of the quantile histogram over [-2, 2]")
    sign_bias_rate: float = setting(1e-3, at_least=0.0, doc="step of the aux-free sign bias")
    load_balance_coefficient: float = setting(0.0, at_least=0.0, doc="weight of the load-balance loss (1.0 = balanced)")
    z_loss_coefficient: float = setting(0.0, at_least=0.0, doc="weight of the router z-loss")

    def __post_init__(self):
        check(self)
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"router.experts_per_token = {self.experts_per_token}: at most router.num_experts = {self.num_experts}"
            )
        if self.balancing == "quantile" and self.experts_per_token == self.num_experts:
            raise ConfigError(
                f"router.balancing = 'quantile': needs router.experts_per_token = {self.experts_per_token} below "
                f"router.num_experts = {self.num_experts}; allowed here: sign_bias, none"
            )
