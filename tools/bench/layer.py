"""One layer of routed experts on a mesh: built, checked against float32, timed forward and forward with backward.

Letters: S ep shards, T tokens of a shard, H row width, F expert hidden width, E experts, K choices.

Router and shared experts are left out: routes are given. The loss is sum(out * d_out), so the backward pass gives the
gradients of rows, combine weights and both expert weights.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_jax.ep import EPConfig, routed_experts_local
from ep_jax.ep.drops import DROPPED_BY_RECEIVER, DROPPED_BY_SENDER, KEPT
from tools.bench.ceilings import Ceilings
from tools.bench.check import check
from tools.bench.shapes import Shape, routing
from tools.bench.timing import Times, measure

# (rows [T,H], ids [T,K], weights [T,K], w_in [e,H,2F], w_out [e,F,H]) of a shard -> (out [T,H], fates int8 [T,K])
LocalLayer = Callable[..., tuple[jax.Array, jax.Array]]


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
class Memory:
    """What XLA allots to one compiled program, bytes of one device."""

    arguments: int
    outputs: int
    temporary: int
    aliased: int  # counted in arguments and in outputs, but there once

    @property
    def peak(self) -> int:
        """The whole program's; comparable with the peak of a caching allocator that holds inputs and gradients too."""
        return self.arguments + self.outputs + self.temporary - self.aliased

    def as_json(self) -> dict[str, float]:
        parts = dataclasses.asdict(self) | {"peak": self.peak}
        return {f"{name}_gib": round(size / 2**30, 5) for name, size in parts.items() if name != "aliased"}


@dataclasses.dataclass(frozen=True)
class Work:
    """What the most loaded device did, which decides how long all take: accepted rows only, padding not counted."""

    flops: float
    off_device_bytes: float  # that leave it, in all exchanges together

    def rates(self, ms: float) -> dict[str, float]:
        """Achieved over the whole time of the layer, not over the part of it that multiplies or sends."""
        return {
            "tflops": round(self.flops / ms / 1e9, 1),
            "off_device_gb_per_s": round(self.off_device_bytes / ms / 1e6, 1),
        }


@dataclasses.dataclass(frozen=True)
class Result:
    """What one variant of a layer did."""

    forward: Times
    both: Times
    paused: Times  # the same as `both`, but every call after a pause
    fates: np.ndarray  # int8 [S*T, K]
    error: float  # relative error of the checked tokens' outputs
    gradient_error: float  # the largest one of the gradients of their rows and weights, and of the checked experts'
    memory: Memory  # of the compiled forward and backward pass
    spent_s: dict[str, float]  # by what the benchmark did: compile, check, measure

    @property
    def dropped(self) -> float:
        return float(np.isin(self.fates, (DROPPED_BY_SENDER, DROPPED_BY_RECEIVER)).mean())

    def as_json(self) -> dict[str, Any]:
        return {
            "forward": self.forward.as_json(),
            "forward_backward": self.both.as_json(),
            "forward_backward_after_pauses": self.paused.as_json(),
            "drop_rate": self.dropped,
            "drop_rate_sender": float((self.fates == DROPPED_BY_SENDER).mean()),
            "drop_rate_receiver": float((self.fates == DROPPED_BY_RECEIVER).mean()),
            "relative_error": self.error,
            "relative_error_of_gradients": self.gradient_error,
            "spent_s": self.spent_s,
        } | self.memory.as_json()


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


def protocol_layer(settings: EPConfig, sequence_length: int) -> LocalLayer:
    """The library's layer under these settings; every token is valid."""

    def local(rows, ids, weights, w_in, w_out):
        valid = lax.pcast(jnp.ones(rows.shape[0], bool), "ep", to="varying")
        out, drops = routed_experts_local(
            rows, ids, weights, valid, w_in, w_out, sequence_length=sequence_length, settings=settings
        )
        return out, drops.fate_TK

    return local


def compile_layer(problem: Problem, local: LocalLayer) -> tuple[Any, Any]:
    """Compiled (rows, weights, w_in, w_out, ids) -> (out, fates), and (..., d_out) -> (the four gradients, out)."""
    split = PartitionSpec("ep")
    over_mesh = jax.shard_map(local, mesh=problem.mesh, in_specs=(split,) * 5, out_specs=(split, split))

    def forward(rows, weights, w_in, w_out, ids):
        return over_mesh(rows, ids, weights, w_in, w_out)

    def pass_both_ways(rows, weights, w_in, w_out, ids, d_out):
        out, pull = jax.vjp(lambda *inputs: over_mesh(inputs[0], ids, *inputs[1:])[0], rows, weights, w_in, w_out)
        out, d_out = lax.optimization_barrier((out, d_out))
        return pull(d_out), out

    # Routes are arguments, not constants: XLA would compute at compile time what depends on constants alone. The output
    # is asked for beside the gradients: a transport whose gradients do not need it would skip half its forward pass.
    # And as in training its gradient comes after it: a transport may not send the one while it waits for the other.
    both = jax.jit(pass_both_ways)
    gradients = both.lower(*problem.inputs, problem.ids_TK, problem.d_out_TH)
    return jax.jit(forward).lower(*problem.inputs, problem.ids_TK).compile(), gradients.compile()


def run_layer(problem: Problem, local: LocalLayer, iterations: int, payload: str = "compute") -> Result:
    """Checks and times one variant; payload as `ep.payload`. Raises ArithmeticError when its values are wrong."""
    began = time.perf_counter()
    forward, gradients = compile_layer(problem, local)
    compiled = time.perf_counter()
    forward_arguments = (*problem.inputs, problem.ids_TK)
    out, fates = forward(*forward_arguments)
    found, _ = gradients(*forward_arguments, problem.d_out_TH)
    error, gradient_error = check(problem, np.asarray(fates), out, found, payload)
    checked = time.perf_counter()
    times = measure(forward, *forward_arguments, iterations=iterations)
    both = measure(gradients, *forward_arguments, problem.d_out_TH, iterations=iterations)
    paused = measure(gradients, *forward_arguments, problem.d_out_TH, iterations=iterations, paused=True)
    spent = {"compile": compiled - began, "check": checked - compiled, "measure": time.perf_counter() - checked}
    return Result(
        forward=times,
        both=both,
        paused=paused,
        fates=np.asarray(fates),
        error=error,
        gradient_error=gradient_error,
        memory=memory_of(gradients),
        spent_s={name: round(seconds, 1) for name, seconds in spent.items()},
    )


def memory_of(compiled: Any) -> Memory:
    """XLA's account of a compiled program; zeros where the backend gives none."""
    found = compiled.memory_analysis()
    names = ("argument", "output", "temp", "alias")
    return Memory(*(getattr(found, f"{name}_size_in_bytes") if found else 0 for name in names))


def work_of(result: Result, problem: Problem, *, backward: bool, once_per_peer: bool = False) -> Work:
    """FLOPs of accepted rows, and bytes of those that leave a device, on the most loaded device.

    once_per_peer: a token's row, and the sum of what it gets back from a peer, cross to each peer once.
    """
    shards, shape = problem.mesh.size, problem.shape
    kept = result.fates == KEPT
    destination = np.asarray(problem.ids_TK) // (shape.num_experts(shards) // shards)
    source = np.repeat(np.arange(shards), shape.tokens)
    load = int(np.bincount(destination[kept], minlength=shards).max())
    rows = np.zeros((len(source), shards), int)  # of each token to each shard
    np.add.at(rows, (np.nonzero(kept)[0], destination[kept]), 1)
    rows[np.arange(len(source)), source] = 0
    off = int((np.minimum(rows, 1) if once_per_peer else rows).sum(axis=1).reshape(shards, -1).sum(axis=1).max())
    legs = 4 if backward else 2
    moved = off * legs * shape.width * problem.rows_TH.dtype.itemsize
    return Work(shape.flops(load, backward=backward), moved)


def limit_ms(work: Work, rates: Ceilings, *, backward: bool) -> float:
    """The physical limit of this work: its FLOPs at the matmul rate plus its bytes at the link rate."""
    return rates.limit_ms(work.flops, work.off_device_bytes, backward=backward)
