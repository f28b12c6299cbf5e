"""Optimizer: AdamW or Muon over the kinds of parameters, clipping, weight decay and the learning-rate schedule.

Each parameter has a kind (`ep_jax.model` gives the tree), and the kind decides what happens to it:

| kind      | one leaf, behind any leading layer axis | name = adamw | name = muon | weight decay |
| --------- | --------------------------------------- | ------------ | ----------- | ------------ |
| dense     | [in, out]                               | Adam         | Muon        | yes          |
| expert    | [E, in, out]                            | Adam         | Muon        | yes          |
| head      | [D, V]                                  | Adam         | Adam        | yes          |
| router    | [D, E]                                  | Adam         | Adam        | yes          |
| embedding | [V, D]                                  | Adam         | Adam        | no           |
| norm      | [D]                                     | Adam         | Adam        | no           |

Order within an update: clip by one global norm over all gradient leaves (each parameter once, experts included), Adam
or Muon direction, plus weight_decay * parameter, times -learning_rate.

Muon orthogonalises the last two axes; every leading axis (layer block, expert) is a batch axis, so each matrix of a
stack stands alone. The arithmetic is that of `optax.contrib.muon` (the tests compare them), which is not called because
it flattens the leading axes, and flattening [layers, experts] makes XLA gather all experts on every device. The update
has a root mean square of about 0.2 whatever the shape, as Adam's has, so one learning rate serves both.

Everything works on global arrays under `jax.jit`, on a mesh with Auto axes, outside any shard_map. Update counts live
in the optimizer state, so a resumed run continues its schedule. All state leaves are arrays of their own.

Not here: the guard against non-finite gradients (a NaN in one leaf reaches every leaf through the norm, also with
learning rate 0): `ep_jax.step` keeps the old state then.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ep_jax.fields import check, setting

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("linear", "cosine", "wsd")
KINDS = ("embedding", "head", "dense", "expert", "router", "norm")
DECAYED_KINDS = ("dense", "expert", "head", "router")
MUON_KINDS = ("dense", "expert")

# Quintic Newton-Schulz coefficients of K. Jordan's Muon: steep at zero, singular values end between about 0.7 and 1.2.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
# Update size that matches Adam's, from "Muon is Scalable for LLM Training", arXiv 2502.16982.
MUON_UPDATE_RMS = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become updates."""

    SECTION: ClassVar[str] = "optimizer"

    name: str = setting("adamw", doc="adamw, or muon for matrices and Adam for the rest", choices=OPTIMIZERS)
    learning_rate: float = setting(3e-3, at_least=0.0, doc="peak learning rate")
    adam_learning_rate: float | None = setting(
        None, at_least=0.0, doc="peak for what muon leaves to Adam (embedding, head, router, norms); default: the same"
    )
    schedule: str = setting("cosine", doc="shape of the decay after warm-up", choices=SCHEDULES)
    warmup_steps: int = setting(40, at_least=0, unit="steps", doc="linear rise; the last of them is at the peak")
    decay_fraction: float = setting(
        0.2, at_least=0.0, at_most=1.0, doc="wsd: the last part of the run, in which the rate decays"
    )
    final_fraction: float = setting(0.1, at_least=0.0, at_most=1.0, doc="learning rate of the last step over the peak")
    b1: float = setting(0.9, at_least=0.0, at_most=0.999999, doc="Adam: decay of the mean of gradients")
    b2: float = setting(0.95, at_least=0.0, at_most=0.999999, doc="Adam: decay of the mean of squared gradients")
    epsilon: float = setting(1e-8, above=0.0, doc="Adam: added to the root of the mean square")
    weight_decay: float = setting(
        0.1, at_least=0.0, doc="decoupled, times the learning rate; dense, expert, head and router weights only"
    )
    clip_norm: float = setting(1.0, at_least=0.0, doc="largest global gradient norm; 0 = no clipping")
    muon_momentum: float = setting(0.95, at_least=0.0, at_most=0.999999, doc="Muon: decay of the (Nesterov) momentum")
    muon_dtype: str = setting(
        "float32",
        doc="Muon: type in which updates are orthogonalised; bfloat16 is as good and far faster on GPUs",
        choices=("float32", "bfloat16"),
    )

    def __post_init__(self):
        check(self)


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """Learning rate of an update as a function of the number of updates before it.

    With n = count + 1 and w = warmup_steps: n <= w gives peak * n / w, so the first step (count 0) is at peak / w,
    never at 0, and step n = w at the peak (w = 0: the first step is). Then the rate falls to final_fraction * peak,
    reached exactly at n = num_steps and kept after it: on a line (linear), on half a cosine (cosine), or flat until the
    last round(decay_fraction * num_steps) steps and on a line in those (wsd). A run no longer than its warm-up ends
    inside it.

    Args:
      num_steps: length of the whole run in steps, not of what is left after a resume.
    Returns: function from int32 [] to float32 [].
    """
    warmup_end = max(config.warmup_steps, 1)
    decay_start = warmup_end
    if config.schedule == "wsd":
        decay_start = max(warmup_end, num_steps - round(config.decay_fraction * num_steps))
    decay_steps = max(num_steps - decay_start, 1)

    def learning_rate(count):
        nth = jnp.asarray(count, jnp.int32) + 1
        progress = jnp.clip((nth - decay_start) / decay_steps, 0.0, 1.0)
        fallen = 0.5 - 0.5 * jnp.cos(jnp.pi * progress) if config.schedule == "cosine" else progress
        decayed = 1.0 - (1.0 - config.final_fraction) * fallen
        return config.learning_rate * jnp.where(nth < warmup_end, nth / warmup_end, decayed)

    return learning_rate


def make_optimizer(config: OptimizerConfig, num_steps: int, kinds: Any) -> optax.GradientTransformation:
    """The whole transformation from gradients to updates: clipping, direction, weight decay, learning rate.

    Args:
      num_steps: length of the whole run, for the schedule.
      kinds: tree of the parameters' structure with one of KINDS at each leaf.
    Raises ValueError for an unknown kind.
    """
    unknown = set(jax.tree.leaves(kinds)) - set(KINDS)
    if unknown:
        raise ValueError(f"parameter kinds {sorted(unknown)}: allowed are {', '.join(KINDS)}")
    decayed = jax.tree.map(lambda kind: kind in DECAYED_KINDS, kinds)

    def finish(direction, peak):
        return optax.chain(
            direction,
            optax.add_decayed_weights(config.weight_decay, mask=decayed),
            optax.scale_by_learning_rate(
                learning_rate_schedule(dataclasses.replace(config, learning_rate=peak), num_steps)
            ),
        )

    adam_peak = config.learning_rate
    if config.name == "muon" and config.adam_learning_rate is not None:
        adam_peak = config.adam_learning_rate
    update = finish(optax.scale_by_adam(config.b1, config.b2, config.epsilon), adam_peak)
    if config.name == "muon":
        labels = jax.tree.map(lambda kind: "muon" if kind in MUON_KINDS else "adam", kinds)
        muon = finish(scale_by_muon(config.muon_momentum, config.muon_dtype), config.learning_rate)
        update = optax.partition({"muon": muon, "adam": update}, labels)
    # Without clipping an identity keeps its place, so that a resumed run may switch it on or off.
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, update)


def gradient_norm(gradients: Any) -> jax.Array:
    """float32 []: the norm that clipping uses and metrics report, over all leaves, each parameter counted once.

    On global arrays only: inside a shard_map it would miss the other shards.
    """
    return optax.tree.norm(gradients)


class MuonState(NamedTuple):
    """Number of updates, int32 [], and the mean of gradients, float32 like the parameters."""

    count: jax.Array
    momentum: Any


def scale_by_muon(momentum: float, dtype: str = "float32") -> optax.GradientTransformation:
    """Direction of Muon for leaves [..., in, out]: orthogonalised Nesterov momentum with RMS about MUON_UPDATE_RMS."""

    def init(params):
        return MuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    def update(updates, state, params=None):
        del params
        count = state.count + 1
        mean = optax.tree.update_moment(updates, state.momentum, momentum, 1)
        ahead = optax.tree.bias_correction(mean, momentum, count + 1)
        now = optax.tree.bias_correction(updates, momentum, count)
        lookahead = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, ahead, now)
        return jax.tree.map(lambda x: muon_direction(x, dtype), lookahead), MuonState(count, mean)

    return optax.GradientTransformation(init, update)


def muon_direction(x: jax.Array, dtype: str = "float32") -> jax.Array:
    """Orthogonalises each matrix of x, float [..., in, out], and scales it by MUON_UPDATE_RMS * sqrt(max(in, out))."""
    return MUON_UPDATE_RMS * max(x.shape[-2:]) ** 0.5 * orthogonalize(x, dtype).astype(x.dtype)


def orthogonalize(x: jax.Array, dtype: str = "float32") -> jax.Array:
    """Moves the singular values of each matrix of x, float [..., in, out], near 1 by Newton-Schulz iterations.

    Leading axes are kept apart and never reshaped, so a stack split over devices stays where it is. The norm is taken
    in the type of x, the iterations run in `dtype`, which is the result's type.
    """
    if x.shape[-2] > x.shape[-1]:  # the Gram matrix of the shorter side is the cheaper one
        return orthogonalize(x.mT, dtype).mT
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = (x / ((x * x).sum((-2, -1), keepdims=True) ** 0.5 + 1e-8)).astype(dtype)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def optimizer_shardings(tx: optax.GradientTransformation, params: Any, shardings: Any) -> Any:
    """Shardings of `tx.init(params)`: moments follow their parameter, counts are replicated.

    A moment is known by the end of its path in the state, which is its parameter's path, and by its shape.

    Args:
      params: arrays or ShapeDtypeStructs.
      shardings: NamedSharding of each parameter, same structure.
    Returns: NamedShardings in the structure of the state, for `jax.jit(tx.init, out_shardings=...)` or a restore.
    """
    named_params = jax.tree_util.tree_leaves_with_path(params)
    sharding_leaves = jax.tree.leaves(shardings)
    by_path = {path: (leaf.shape, s) for (path, leaf), s in zip(named_params, sharding_leaves, strict=True)}
    replicated = NamedSharding(sharding_leaves[0].mesh, PartitionSpec())

    def sharding_of(path, leaf):
        for start in range(len(path)):
            shape, sharding = by_path.get(path[start:], (None, None))
            if shape == leaf.shape:
                return sharding
        return replicated

    return jax.tree_util.tree_map_with_path(sharding_of, jax.eval_shape(tx.init, params))
