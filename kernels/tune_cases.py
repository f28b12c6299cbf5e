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
from .swiglu import op as swiglu_op
from .swiglu import reference as swiglu_reference

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


def swiglu_cases(shape: Shape) -> Iterator[Case]:
    """SwiGLU of weighted rows routed uniformly, and its gradient."""
    groups, num_rows = routed_groups(shape)
    owned, hidden = owned_rows(groups, num_rows), shape.hidden
    used = float(owned.sum())
    hidden_R2F, d_middle_RF = (
        jnp.where(jnp.asarray(owned)[:, None], normal(seed, (num_rows, width)), jnp.nan)
        for seed, width in ((8, 2 * hidden), (3, hidden))
    )
    weights_R = jnp.where(owned, np.random.default_rng(1).random(num_rows), np.nan).astype(jnp.float32)
    yield Case(
        name="swiglu forward",
        shape=shape.name,
        launches=swiglu_op.FORWARD_CANDIDATES,
        run=lambda launch: lambda x, w, groups: swiglu_op.swiglu(x, groups, w, launch),
        arguments=(hidden_R2F, weights_R, groups),
        reference=lambda x, w, groups: swiglu_reference.swiglu(x, w),
        baseline=swiglu_reference.swiglu,
        baseline_arguments=(hidden_R2F, weights_R),
        work=2.0 * 3 * hidden * used,
        baseline_work=2.0 * 3 * hidden * num_rows,
        unit="TB/s",
        owned=owned,
    )
    yield Case(
        name="swiglu gradient",
        shape=shape.name,
        launches=swiglu_op.BACKWARD_CANDIDATES,
        run=lambda launch: lambda x, d, w, groups: swiglu_op.swiglu_gradient(x, d, groups, w, launch),
        arguments=(hidden_R2F, d_middle_RF, weights_R, groups),
        reference=lambda x, d, w, groups: swiglu_reference.swiglu_gradient(x, d, w),
        baseline=swiglu_reference.swiglu_gradient,
        baseline_arguments=(hidden_R2F, d_middle_RF, weights_R),
        work=2.0 * 5 * hidden * used,
        baseline_work=2.0 * 5 * hidden * num_rows,
        unit="TB/s",
        owned=owned,
    )


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


def edge_cases(kinds: Sequence[str]) -> Iterator[Case]:
    """Grouped products on experts of awkward sizes, contiguous and at a fixed distance, between rows of NaN."""
    sizes = jnp.array(EDGE_SIZES, jnp.int32)
    for layout, groups, num_rows in (
        ("ragged", ragged_groups(sizes), sum(EDGE_SIZES) + 100),
        ("capacity", capacity_groups(sizes, max(EDGE_SIZES)), max(EDGE_SIZES) * len(EDGE_SIZES)),
    ):
        if "matmul" in kinds:
            yield from product_cases(f"edges {layout}", groups, num_rows, EDGE_WIDTHS)


def routed_groups(shape: Shape, kind: str = "uniform") -> tuple[Groups, int]:
    """(contiguous groups, rows of the buffer) of the first GPU."""
    experts = shape.num_experts(SHARDS) // SHARDS
    ids, _ = routing(kind, shape, SHARDS)
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
