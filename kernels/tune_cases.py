"""What `tune.py` runs: each operation at a benchmark shape, with its launches, its plain reference and XLA's own way.

Letters as in tools/bench/shapes.py; one GPU's share at ep 2. Rows are random; those that nobody owns are NaN.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tools.bench.shapes import Shape, routing

from . import call
from .combine_rows import op as combine_op
from .combine_rows import reference as combine_reference
from .gather_rows import op as gather_op
from .gather_rows import reference as gather_reference
from .grouped_matmul import op as matmul_op
from .grouped_matmul import reference as matmul_reference
from .grouped_matmul.tiles import Groups, capacity_groups, ragged_groups
from .grouped_matmul_mgpu import op as hopper_op
from .spread_rows import op as spread_op
from .swiglu import op as swiglu_op
from .swiglu import reference as swiglu_reference
from .weight_gradient_mgpu import op as gradient_op

SHARDS = 2
SLACK = 1.05  # rows of a buffer per row that is used
EDGE_SIZES = (0, 1, 7, 63, 64, 65, 300, 0, 128, 5)
EDGE_WIDTHS = {"triton": (264, 392), "hopper": (512, 1024)}  # of which no block divides Triton's
TOKAMAX = "tokamax"
WAYS = ("triton", "gather", "hopper", TOKAMAX)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to do a case's operation: launches, and what a launch makes a function of the case's arguments."""

    launches: Sequence[Any]
    run: Callable[..., Callable[..., Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One operation at one shape."""

    name: str
    shape: str
    ways: Mapping[str, Way]
    arguments: tuple[Any, ...]
    reference: Callable[..., Any]  # of `arguments`
    baseline: Callable[..., Any]  # of `baseline_arguments`: XLA's own way
    baseline_arguments: tuple[Any, ...]
    work: float  # bytes, or floating-point operations
    baseline_work: float
    unit: str  # "TB/s" or "TFLOP/s"
    owned: np.ndarray | None = None  # bool per row of the output, where not all of them count


def triton(launches: Sequence[Any], run: Callable[..., Callable[..., Any]]) -> dict[str, Way]:
    return {"triton": Way(launches, run)}


def gather_cases(shape: Shape, routings: Sequence[str]) -> Iterator[Case]:
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
            ways=triton(
                gather_op.CANDIDATES, lambda launch: lambda *given: gather_op.gather_rows(*given, launch=launch)
            ),
            arguments=(rows, jnp.asarray(index)),
            reference=gather_reference.gather_rows,
            baseline=gather_reference.gather_rows,
            baseline_arguments=(rows, jnp.asarray(index)),
            work=2.0 * shape.width * (used + slots),
            baseline_work=2.0 * shape.width * (used + slots),
            unit="TB/s",
        )


def spread_cases(shape: Shape, routings: Sequence[str]) -> Iterator[Case]:
    """Tokens into the order of their experts, all on one GPU, of random choices; a gather of the same beside it."""
    rng = np.random.default_rng(0)
    slots, experts = buffer_rows(shape), shape.num_experts(1)
    assignment = np.argsort(np.argsort(rng.random((shape.tokens, experts)))[:, : shape.choices].ravel(), kind="stable")
    source = np.full(slots, -1, np.int32)
    source[: shape.rows] = assignment // shape.choices
    places = np.empty(shape.rows, np.int32)
    places[assignment] = np.arange(shape.rows)
    rows, source = normal(0, (shape.tokens, shape.width)), jnp.asarray(source)
    places = jnp.asarray(places.reshape(shape.tokens, shape.choices))

    def gathered(launch):
        return lambda rows, source, places: gather_op.gather_rows(rows, source, launch)

    def plain(rows, source, places):
        return gather_reference.gather_rows(rows, source)

    work = 2.0 * shape.width * (shape.tokens + slots)
    yield Case(
        name="spread",
        shape=shape.name,
        ways=triton(spread_op.CANDIDATES, lambda launch: lambda *given: spread_op.spread_rows(*given, launch=launch))
        | {"gather": Way(gather_op.CANDIDATES[:1], gathered)},
        arguments=(rows, source, places),
        reference=plain,
        baseline=plain,
        baseline_arguments=(rows, source, places),
        work=work,
        baseline_work=work,
        unit="TB/s",
    )


def combine_cases(shape: Shape, routings: Sequence[str]) -> Iterator[Case]:
    """Random places; nothing here depends on a routing."""
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
        return combine_reference.weighted_sum(rows, weights, place, rows.dtype)

    def run(launch):
        return lambda rows, weights, place: combine_op.weighted_sum(rows, weights, place, rows.dtype, launch)

    yield Case(
        name="combine forward",
        shape=shape.name,
        ways=triton(combine_op.FORWARD_CANDIDATES, run),
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
        ways=triton(
            combine_op.BACKWARD_CANDIDATES,
            lambda launch: lambda *given: combine_op.combine_rows_gradient(*given, launch=launch),
        ),
        arguments=backward,
        reference=combine_reference.combine_rows_gradient,
        baseline=combine_reference.combine_rows_gradient,
        baseline_arguments=backward,
        work=2.0 * shape.width * (shape.tokens + shape.rows + slots),
        baseline_work=2.0 * shape.width * (shape.tokens + shape.rows + slots),
        unit="TB/s",
    )


def matmul_cases(shape: Shape, routings: Sequence[str]) -> Iterator[Case]:
    """The products with both matrices on ragged rows."""
    for kind in routings:
        groups, num_rows = routed_groups(shape, kind)
        for widths in ((shape.width, 2 * shape.hidden), (shape.hidden, shape.width)):
            title = f"{shape.name} {kind} {widths[0]} -> {widths[1]}"
            yield from product_cases(title, groups, num_rows, widths, by=WAYS)


def swiglu_cases(shape: Shape, routings: Sequence[str]) -> Iterator[Case]:
    """SwiGLU of weighted rows routed in the first way, and its gradient."""
    groups, num_rows = routed_groups(shape, routings[0])
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
        ways=triton(
            swiglu_op.FORWARD_CANDIDATES, lambda launch: lambda x, w, groups: swiglu_op.swiglu(x, groups, w, launch)
        ),
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
        ways=triton(
            swiglu_op.BACKWARD_CANDIDATES,
            lambda launch: lambda x, d, w, groups: swiglu_op.swiglu_gradient(x, d, groups, w, launch),
        ),
        arguments=(hidden_R2F, d_middle_RF, weights_R, groups),
        reference=lambda x, d, w, groups: swiglu_reference.swiglu_gradient(x, d, w),
        baseline=swiglu_reference.swiglu_gradient,
        baseline_arguments=(hidden_R2F, d_middle_RF, weights_R),
        work=2.0 * 5 * hidden * used,
        baseline_work=2.0 * 5 * hidden * num_rows,
        unit="TB/s",
        owned=owned,
    )


def product_cases(
    title: str, groups: Groups, num_rows: int, widths: tuple[int, int], by: Sequence[str]
) -> Iterator[Case]:
    """Forward and both gradients, in the ways named `by`; the baselines are batched einsums on balanced rows."""
    (k, n), experts, owned = widths, groups.sizes_e.shape[0], owned_rows(groups, num_rows)
    even = int(owned.sum()) // experts
    poison = jnp.asarray(owned)[:, None]
    x, d_out = (jnp.where(poison, normal(seed, (num_rows, width)), jnp.nan) for seed, width in ((3, k), (4, n)))
    weights = normal(5, (experts, k, n)) * k**-0.5
    x_even, d_even = normal(6, (experts, even, k)), normal(7, (experts, even, n))
    shared = {
        "shape": title,
        "work": 2.0 * k * n * float(owned.sum()),
        "baseline_work": 2.0 * k * n * even * experts,
        "unit": "TFLOP/s",
    }

    def case(name: str, ways: Mapping[str, Way], **rest: Any) -> Case:
        return Case(name=name, ways={way: ways[way] for way in by if way in ways}, **rest, **shared)

    yield case(
        "matmul forward",
        row_product_ways(transposed=False),
        arguments=(x, weights, groups),
        reference=matmul_reference.grouped_matmul,
        baseline=lambda x, w: jnp.einsum("erk,ekn->ern", x, w),
        baseline_arguments=(x_even, weights),
        owned=owned,
    )
    yield case(
        "matmul row gradient",
        row_product_ways(transposed=True),
        arguments=(d_out, weights, groups),
        reference=lambda d, w, groups: matmul_reference.grouped_matmul(d, w.swapaxes(1, 2), groups),
        baseline=lambda d, w: jnp.einsum("ern,ekn->erk", d, w),
        baseline_arguments=(d_even, weights),
        owned=owned,
    )
    yield case(
        "matmul weight gradient",
        weight_product_ways(),
        arguments=(x, d_out, groups),
        reference=lambda x, d, groups: matmul_reference.grouped_weight_gradient(x, d, groups, x.dtype),
        baseline=lambda x, d: jnp.einsum("erk,ern->ekn", x, d),
        baseline_arguments=(x_even, d_even),
    )


def row_product_ways(*, transposed: bool) -> dict[str, Way]:
    def run(product):
        return lambda launch: lambda x, w, groups: product(x, w, groups, transposed=transposed, launch=launch)

    return {
        "triton": Way(matmul_op.CANDIDATES, run(matmul_op.product)),
        "hopper": Way(hopper_op.CANDIDATES, run(hopper_op.product)),
        TOKAMAX: tokamax_way(summed=(1, 2 if transposed else 1), experts=(0,)),
    }


def weight_product_ways() -> dict[str, Way]:
    def run(product):
        return lambda launch: lambda x, d_out, groups: product(x, d_out, groups, x.dtype, launch)

    return {
        "triton": Way(matmul_op.CANDIDATES, run(matmul_op.weight_product)),
        "hopper": Way(gradient_op.CANDIDATES, run(gradient_op.weight_product)),
        TOKAMAX: tokamax_way(summed=(0, 0), experts=()),
    }


def tokamax_way(summed: tuple[int, int], experts: tuple[int, ...]) -> Way:
    """Its product of ragged rows, not tuned; "mosaic" is its implementation for Hopper."""
    left, right = summed
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([left], [right]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=experts
    )

    def run(implementation):
        import tokamax

        return lambda one, other, groups: tokamax.ragged_dot_general(
            one, other, groups.sizes_e, dimensions, implementation=implementation
        )

    return Way(("mosaic",), run)


def edge_cases() -> Iterator[Case]:
    """Grouped products on experts of awkward sizes, contiguous and at a fixed distance, between rows of NaN."""
    sizes = jnp.array(EDGE_SIZES, jnp.int32)
    most = whole(max(EDGE_SIZES))
    for layout, groups, num_rows in (
        ("ragged", ragged_groups(sizes), whole(sum(EDGE_SIZES) + 100)),
        ("capacity", capacity_groups(sizes, most), most * len(EDGE_SIZES)),
    ):
        for way, widths in EDGE_WIDTHS.items():
            yield from product_cases(f"edges {layout}", groups, num_rows, widths, by=(way,))


def routed_groups(shape: Shape, kind: str) -> tuple[Groups, int]:
    """(contiguous groups, rows of the buffer) of the first GPU."""
    experts = shape.num_experts(SHARDS) // SHARDS
    ids, _ = routing(kind, shape, SHARDS)
    sizes = np.bincount(ids.ravel(), minlength=SHARDS * experts)[:experts].astype(np.int32)
    return ragged_groups(jnp.asarray(sizes)), whole(max(buffer_rows(shape), int(sizes.sum())))


def whole(num_rows: int) -> int:
    """Rows of a buffer that every way takes: tokamax's weight gradient wants a multiple of 64."""
    return call.ceil_div(num_rows, 64) * 64


def buffer_rows(shape: Shape) -> int:
    return int(SLACK * shape.rows)


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def owned_rows(groups: Groups, num_rows: int) -> np.ndarray:
    owned = np.zeros(num_rows, bool)
    for start, size in zip(*map(np.asarray, groups), strict=True):
        owned[start : start + size] = True
    return owned
