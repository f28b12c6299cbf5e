"""What `tune.py` runs: each operation at a benchmark shape, with its launches, its plain reference and XLA's own way.

Letters as in tools/bench/shapes.py; one GPU's share at ep 2. Rows are random; those that nobody owns are NaN.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tools.bench.shapes import Shape, routing

from .combine_rows import op as combine_op
from .combine_rows import reference as combine_reference
from .gather_rows import op as gather_op
from .gather_rows import reference as gather_reference
from .grouped_matmul import op as matmul_op
from .grouped_matmul import reference as matmul_reference
from .grouped_matmul.tiles import Groups, capacity_groups, ragged_groups
from .grouped_mlp import op as mlp_op
from .grouped_mlp import reference as mlp_reference

SHARDS = 2
SLACK = 1.05  # rows of a buffer per row that is used
EDGE_SIZES = (0, 1, 7, 63, 64, 65, 300)
EDGE_WIDTHS = 264, 392  # multiples of 8 that no block divides


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One operation at one shape."""

    name: str
    shape: str
    launches: Sequence[Any]
    run: Callable[..., Callable[..., Any]]  # of a launch; gives a function of `arguments`
    arguments: tuple[Any, ...]
    reference: Callable[..., Any]  # of `arguments`
    baseline: Callable[..., Any]  # of `baseline_arguments`: XLA's own way
    baseline_arguments: tuple[Any, ...]
    work: float  # bytes, or floating-point operations
    baseline_work: float
    unit: str  # "TB/s" or "TFLOP/s"
    owned: np.ndarray | None = None  # bool per row of the output, where not all of them count


def cases(shape: Shape, kinds: Sequence[str]) -> Iterator[Case]:
    """The cases of a shape, made one by one: their arrays do not all fit beside each other."""
    makers = {"gather": gather_cases, "combine": combine_cases, "matmul": matmul_cases}
    for kind in kinds:
        yield from makers[kind](shape)


def gather_cases(shape: Shape) -> Iterator[Case]:
    """Expansion of tokens into a payload with empty slots, and a permutation of payload rows."""
    rng = np.random.default_rng(0)
    slots = buffer_rows(shape)
    tokens = np.full(slots, -1, np.int32)
    tokens[np.sort(rng.permutation(slots)[: shape.rows])] = np.repeat(np.arange(shape.tokens), shape.choices)
    for name, num_rows, index in (
        ("gather expand", shape.tokens, tokens),
        ("gather permute", slots, rng.permutation(slots).astype(np.int32)),
    ):
        rows = normal(0, (num_rows, shape.width))
        used = np.unique(index[index >= 0]).size
        yield Case(
            name=name,
            shape=shape.name,
            launches=gather_op.CANDIDATES,
            run=lambda launch: lambda *given: gather_op.gather_rows(*given, launch=launch),
            arguments=(rows, jnp.asarray(index)),
            reference=gather_reference.gather_rows,
            baseline=gather_reference.gather_rows,
            baseline_arguments=(rows, jnp.asarray(index)),
            work=2.0 * shape.width * (used + slots),
            baseline_work=2.0 * shape.width * (used + slots),
            unit="TB/s",
        )


def combine_cases(shape: Shape) -> Iterator[Case]:
    rng = np.random.default_rng(1)
    slots = buffer_rows(shape)
    place = rng.permutation(slots)[: shape.rows].astype(np.int32)
    assignment = np.full(slots, -1, np.int32)
    assignment[place] = np.arange(shape.rows)
    place = jnp.asarray(place.reshape(shape.tokens, shape.choices))
    rows, d_out = normal(1, (slots, shape.width)), normal(2, (shape.tokens, shape.width))
    weights = jnp.asarray(rng.random(place.shape), jnp.float32)
    forward = (rows, weights, place)
    backward = (d_out, rows, weights, place, jnp.asarray(assignment))

    def plain(rows, weights, place):
        return combine_reference.combine_rows(rows, weights, place, rows.dtype)

    yield Case(
        name="combine forward",
        shape=shape.name,
        launches=combine_op.FORWARD_CANDIDATES,
        run=lambda launch: lambda x, w, place: combine_op.weighted_sum(x, w, place, x.dtype, launch),
        arguments=forward,
        reference=plain,
        baseline=plain,
        baseline_arguments=forward,
        work=2.0 * shape.width * (shape.rows + shape.tokens),
        baseline_work=2.0 * shape.width * (shape.rows + shape.tokens),
        unit="TB/s",
    )
    yield Case(
        name="combine backward",
        shape=shape.name,
        launches=combine_op.BACKWARD_CANDIDATES,
        run=lambda launch: lambda *given: combine_op.combine_rows_gradient(*given, launch=launch),
        arguments=backward,
        reference=combine_reference.combine_rows_gradient,
        baseline=combine_reference.combine_rows_gradient,
        baseline_arguments=backward,
        work=2.0 * shape.width * (shape.tokens + shape.rows + slots),
        baseline_work=2.0 * shape.width * (shape.tokens + shape.rows + slots),
        unit="TB/s",
    )


def matmul_cases(shape: Shape) -> Iterator[Case]:
    """The product with w_gate_up on ragged rows, routed uniformly."""
    yield from product_cases(shape.name, *routed_groups(shape), (shape.width, 2 * shape.hidden))


def mlp_cases(shape: Shape) -> Iterator[Case]:
    """The products that have SwiGLU in them."""
    yield from swiglu_cases(shape.name, *routed_groups(shape), (shape.width, shape.hidden))


def product_cases(name: str, groups: Groups, num_rows: int, widths: tuple[int, int]) -> Iterator[Case]:
    """Forward and both gradients; the baselines are batched einsums on balanced rows."""
    (k, n), experts, owned = widths, groups.sizes_e.shape[0], owned_rows(groups, num_rows)
    even = int(owned.sum()) // experts
    poison = jnp.asarray(owned)[:, None]
    x, d_out = (jnp.where(poison, normal(seed, (num_rows, width)), jnp.nan) for seed, width in ((3, k), (4, n)))
    weights = normal(5, (experts, k, n)) * k**-0.5
    x_even, d_even = normal(6, (experts, even, k)), normal(7, (experts, even, n))
    shared = {
        "shape": name,
        "launches": matmul_op.CANDIDATES,
        "work": 2.0 * k * n * float(owned.sum()),
        "baseline_work": 2.0 * k * n * even * experts,
        "unit": "TFLOP/s",
    }
    yield Case(
        name="matmul forward",
        run=lambda launch: lambda x, w, groups: matmul_op.product(x, w, groups, launch=launch),
        arguments=(x, weights, groups),
        reference=matmul_reference.grouped_matmul,
        baseline=lambda x, w: jnp.einsum("erk,ekn->ern", x, w),
        baseline_arguments=(x_even, weights),
        owned=owned,
        **shared,
    )
    yield Case(
        name="matmul row gradient",
        run=lambda launch: lambda d, w, groups: matmul_op.product(d, w, groups, transposed=True, launch=launch),
        arguments=(d_out, weights, groups),
        reference=lambda d, w, groups: matmul_reference.grouped_matmul(d, w.swapaxes(1, 2), groups),
        baseline=lambda d, w: jnp.einsum("ern,ekn->erk", d, w),
        baseline_arguments=(d_even, weights),
        owned=owned,
        **shared,
    )
    yield Case(
        name="matmul weight gradient",
        run=lambda launch: lambda x, d, groups: matmul_op.weight_product(x, d, groups, x.dtype, launch),
        arguments=(x, d_out, groups),
        reference=lambda x, d, groups: matmul_reference.grouped_weight_gradient(x, d, groups, x.dtype),
        baseline=lambda x, d: jnp.einsum("erk,ern->ekn", x, d),
        baseline_arguments=(x_even, d_even),
        **shared,
    )


def swiglu_cases(name: str, groups: Groups, num_rows: int, widths: tuple[int, int]) -> Iterator[Case]:
    """Rows to gate, up and their product, and the gradient of gate and up; the baselines are einsum and SwiGLU."""
    (h, f), experts, owned = widths, groups.sizes_e.shape[0], owned_rows(groups, num_rows)
    even = int(owned.sum()) // experts
    poison = jnp.asarray(owned)[:, None]
    x, d_out, hidden = (
        jnp.where(poison, normal(seed, (num_rows, width)), jnp.nan) for seed, width in ((3, h), (4, h), (8, 2 * f))
    )
    w_gate_up, w_down = normal(5, (experts, h, 2 * f)) * h**-0.5, normal(9, (experts, f, h)) * f**-0.5

    def gate_up(x, w):
        hidden = jnp.einsum("erh,ehf->erf", x, w)
        gate, up = jnp.split(hidden, 2, axis=-1)
        return hidden, jax.nn.silu(gate) * up

    def gate_up_gradient(d_out, w, hidden):
        d_middle = jnp.einsum("erh,efh->erf", d_out, w)
        gate, up = jnp.split(hidden, 2, axis=-1)
        return jnp.concatenate(jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)[1](d_middle), axis=-1)

    yield Case(
        name="gate_up forward",
        shape=name,
        launches=mlp_op.GATE_UP_CANDIDATES,
        run=lambda launch: lambda x, w, groups: mlp_op.gate_up(x, w, groups, launch),
        arguments=(x, w_gate_up, groups),
        reference=mlp_reference.gate_up,
        baseline=gate_up,
        baseline_arguments=(normal(6, (experts, even, h)), w_gate_up),
        work=4.0 * h * f * float(owned.sum()),
        baseline_work=4.0 * h * f * even * experts,
        unit="TFLOP/s",
        owned=owned,
    )
    yield Case(
        name="gate_up gradient",
        shape=name,
        launches=mlp_op.GATE_UP_GRADIENT_CANDIDATES,
        run=lambda launch: lambda d, w, hidden, groups: mlp_op.gate_up_gradient(d, w, hidden, groups, launch),
        arguments=(d_out, w_down, hidden, groups),
        reference=mlp_reference.gate_up_gradient,
        baseline=gate_up_gradient,
        baseline_arguments=(normal(6, (experts, even, h)), w_down, normal(7, (experts, even, 2 * f))),
        work=2.0 * h * f * float(owned.sum()),
        baseline_work=2.0 * h * f * even * experts,
        unit="TFLOP/s",
        owned=owned,
    )


def edge_cases(kinds: Sequence[str]) -> Iterator[Case]:
    """Grouped products on experts of awkward sizes, contiguous and at a fixed distance, between rows of NaN."""
    sizes = jnp.array(EDGE_SIZES, jnp.int32)
    for layout, groups, num_rows in (
        ("ragged", ragged_groups(sizes), sum(EDGE_SIZES) + 100),
        ("capacity", capacity_groups(sizes, max(EDGE_SIZES)), max(EDGE_SIZES) * len(EDGE_SIZES)),
    ):
        for kind, make in (("matmul", product_cases), ("mlp", swiglu_cases)):
            if kind in kinds:
                yield from make(f"edges {layout}", groups, num_rows, EDGE_WIDTHS)


def routed_groups(shape: Shape) -> tuple[Groups, int]:
    """(groups, rows of the buffer) of one GPU, routed uniformly."""
    experts = shape.num_experts(SHARDS) // SHARDS
    ids, _ = routing("uniform", shape, SHARDS)
    sizes = np.bincount(ids.ravel(), minlength=SHARDS * experts)[:experts].astype(np.int32)
    return ragged_groups(jnp.asarray(sizes)), max(buffer_rows(shape), int(sizes.sum()))


def buffer_rows(shape: Shape) -> int:
    return int(SLACK * shape.rows)


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def owned_rows(groups: Groups, num_rows: int) -> np.ndarray:
    owned = np.zeros(num_rows, bool)
    for start, size in zip(*map(np.asarray, groups), strict=True):
        owned[start : start + size] = True
    return owned
