"""One layer of routed experts on a mesh: built, checked against float32, timed forward and forward with backward.

Letters: S ep shards, T tokens of a shard, H row width, F expert hidden width, E experts, K choices.

Router and shared experts are left out: routes are given. The loss is sum(out * d_out), so the backward pass gives the
gradients of rows, combine weights and both expert weights.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_jax.ep import EPConfig, routed_experts_local
from ep_jax.ep.drops import DROPPED_BY_RECEIVER, DROPPED_BY_SENDER, KEPT
from tools.bench.ceilings import Ceilings
from tools.bench.shapes import Shape, routing
from tools.bench.timing import Times, measure

CHECKED_TOKENS = 32
TOLERANCE = {"bfloat16": 2e-2, "float32": 2e-5}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs of one layer, placed on the mesh; the arrays are of all shards."""

    shape: Shape
    mesh: Mesh
    rows_TH: jax.Array
    ids_TK: jax.Array
    weights_TK: jax.Array
    w_in_EH2F: jax.Array
    w_out_EFH: jax.Array
    d_out_TH: jax.Array

    @property
    def inputs(self) -> tuple[jax.Array, ...]:
        """What gradients are taken of."""
        return self.rows_TH, self.weights_TK, self.w_in_EH2F, self.w_out_EFH


@dataclasses.dataclass(frozen=True)
class Result:
    """What one variant of a layer did."""

    settings: EPConfig
    forward: Times
    both: Times
    fates: np.ndarray  # int8 [S*T, K]
    error: float  # relative error of the checked tokens' outputs
    gradient_error: float  # the same of their gradients
    temporary_bytes: int  # of the compiled forward and backward pass, a device

    @property
    def dropped(self) -> float:
        return float(np.isin(self.fates, (DROPPED_BY_SENDER, DROPPED_BY_RECEIVER)).mean())

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": {name: getattr(self.settings, name) for name in ("transport", *self.settings.used)},
            "forward": self.forward.as_json(),
            "forward_backward": self.both.as_json(),
            "drop_rate": self.dropped,
            "drop_rate_sender": float((self.fates == DROPPED_BY_SENDER).mean()),
            "drop_rate_receiver": float((self.fates == DROPPED_BY_RECEIVER).mean()),
            "relative_error": self.error,
            "relative_error_of_gradients": self.gradient_error,
            "temporary_gib": round(self.temporary_bytes / 2**30, 3),
        }


def make_problem(shape: Shape, mesh: Mesh, kind: str, dtype: jnp.dtype, seed: int = 0) -> Problem:
    """Random rows and weights, and routes of the given kind."""
    shards, split = mesh.size, NamedSharding(mesh, PartitionSpec("ep"))
    tokens, experts = shards * shape.tokens, shape.num_experts(shards)

    def normal(key, sizes, scale):
        make = jax.jit(
            lambda: (jax.random.normal(jax.random.key(key), sizes) * scale).astype(dtype), out_shardings=split
        )
        return make()

    ids, weights = routing(kind, shape, shards, seed)
    return Problem(
        shape,
        mesh,
        rows_TH=normal(1, (tokens, shape.width), 1.0),
        ids_TK=jax.device_put(ids, split),
        weights_TK=jax.device_put(weights, split),
        w_in_EH2F=normal(2, (experts, shape.width, 2 * shape.hidden), shape.width**-0.5),
        w_out_EFH=normal(3, (experts, shape.hidden, shape.width), shape.hidden**-0.5),
        d_out_TH=normal(4, (tokens, shape.width), 1.0),
    )


def compile_layer(problem: Problem, settings: EPConfig) -> tuple[Any, Any]:
    """Compiled (rows, weights, w_in, w_out, ids) -> (out, fates), and (..., ids, d_out) -> the four gradients."""
    split = PartitionSpec("ep")
    length = problem.shape.sequence_length

    def local(rows, ids, weights, w_in, w_out):
        valid = lax.pcast(jnp.ones(rows.shape[0], bool), "ep", to="varying")
        out, drops = routed_experts_local(
            rows, ids, weights, valid, w_in, w_out, sequence_length=length, settings=settings
        )
        return out, drops.fate_TK

    over_mesh = jax.shard_map(local, mesh=problem.mesh, in_specs=(split,) * 5, out_specs=(split, split))

    def forward(rows, weights, w_in, w_out, ids):
        return over_mesh(rows, ids, weights, w_in, w_out)

    def loss(rows, weights, w_in, w_out, ids, d_out):
        out, _ = over_mesh(rows, ids, weights, w_in, w_out)
        return jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32))

    # Routes are arguments, not constants: XLA would compute at compile time what depends on constants alone.
    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*problem.inputs, problem.ids_TK, problem.d_out_TH)
    return jax.jit(forward).lower(*problem.inputs, problem.ids_TK).compile(), gradients.compile()


def run_layer(problem: Problem, settings: EPConfig, iterations: int) -> Result:
    """Checks and times one variant. Raises ArithmeticError when its values are wrong."""
    forward, gradients = compile_layer(problem, settings)
    forward_arguments = (*problem.inputs, problem.ids_TK)
    out, fates = forward(*forward_arguments)
    d_rows, d_weights, *_ = gradients(*forward_arguments, problem.d_out_TH)
    error, gradient_error = check(problem, np.asarray(fates), out, d_rows, d_weights)
    memory = gradients.memory_analysis()
    return Result(
        settings,
        forward=measure(forward, *forward_arguments, iterations=iterations),
        both=measure(gradients, *forward_arguments, problem.d_out_TH, iterations=iterations),
        fates=np.asarray(fates),
        error=error,
        gradient_error=gradient_error,
        temporary_bytes=memory.temp_size_in_bytes if memory else 0,
    )


def check(problem: Problem, fates: np.ndarray, out: Any, d_rows: Any, d_weights: Any) -> tuple[float, float]:
    """Relative errors of some tokens' outputs and of their gradients, against a float32 layer that drops alike.

    The second is the larger one of row and combine weight gradients. Raises ArithmeticError when one is too large.
    """
    tokens = np.random.default_rng(0).choice(len(fates), CHECKED_TOKENS, replace=False)
    names = ("output", "gradient of rows", "gradient of combine weights")
    given = [np.asarray(x[tokens], np.float32) for x in (problem.rows_TH, problem.weights_TK, problem.d_out_TH)]
    wanted = _reference(
        *given, np.asarray(problem.ids_TK)[tokens], fates[tokens] == KEPT, problem.w_in_EH2F, problem.w_out_EFH
    )
    errors = {}
    for name, got, want in zip(names, (out, d_rows, d_weights), wanted, strict=True):
        want = np.asarray(want)
        errors[name] = float(np.linalg.norm(np.asarray(got[tokens], np.float32) - want) / np.linalg.norm(want))
    allowed = TOLERANCE[problem.rows_TH.dtype.name]
    for name, error in errors.items():
        if not error <= allowed:
            raise ArithmeticError(f"{name}: relative error {error:.1e}, allowed {allowed:.0e}")
    return errors["output"], max(list(errors.values())[1:])


@jax.jit
def _reference(rows_tH, weights_tK, d_out_tH, ids_tK, kept_tK, w_in_EH2F, w_out_EFH):
    """Outputs, row gradients and weight gradients of t tokens in float32, one expert after the other."""

    def one_expert(x_H, expert):
        w_in, w_out = (w[expert].astype(jnp.float32) for w in (w_in_EH2F, w_out_EFH))
        gate, up = jnp.split(jnp.matmul(x_H, w_in, precision="highest"), 2)
        return jnp.matmul(jax.nn.silu(gate) * up, w_out, precision="highest")

    def token(x_H, weight_K, id_K, keep_K):
        results_KH = lax.map(lambda expert: one_expert(x_H, expert), id_K)
        return jnp.sum(jnp.where(keep_K, weight_K, 0)[:, None] * results_KH, axis=0)

    def with_gradients(arguments):
        x_H, weight_K, d_out_H, id_K, keep_K = arguments
        out, pull = jax.vjp(lambda x, weight: token(x, weight, id_K, keep_K), x_H, weight_K)
        return out, *pull(d_out_H)

    return lax.map(with_gradients, (rows_tH, weights_tK, d_out_tH, ids_tK, kept_tK))


def limit_ms(result: Result, problem: Problem, rates: Ceilings, *, backward: bool) -> float:
    """The physical limit of what this result did: FLOPs of its accepted rows, bytes of those that leave a device."""
    shards, shape = problem.mesh.size, problem.shape
    kept = result.fates == KEPT
    destination = np.asarray(problem.ids_TK) // (shape.num_experts(shards) // shards)
    source = np.repeat(np.arange(shards), shape.tokens)[:, None]
    load = int(np.bincount(destination[kept], minlength=shards).max())  # the most loaded device decides
    off = (kept & (destination != source)).sum(axis=1).reshape(shards, -1).sum(axis=1).max()
    legs = 4 if backward else 2
    moved = off * legs * shape.width * problem.rows_TH.dtype.itemsize
    return rates.limit_ms(shape.flops(load, backward=backward), moved, backward=backward)
