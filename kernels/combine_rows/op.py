"""Weighted sums of gathered rows: the last step of a layer, forward and backward in one pass each.

Letters: T tokens, K choices, Q rows, J places, H width. A place outside 0 .. Q-1, as -1, contributes zero. Needs a GPU;
reference.py is the same in plain JAX.
"""

import dataclasses

import jax
import jax.numpy as jnp

from .. import call, derivatives

EMPTY_ROWS, EMPTY_COLUMNS = 16, 256  # tile of the programs that write zero gradients


@dataclasses.dataclass(frozen=True)
class Launch:
    """A program's tile of output (forward) or of gradient (backward, which walks over the columns)."""

    tokens: int = 4
    columns: int = 1024
    warps: int = 4
    load_policy: str = ""


# The first of each was the fastest on an H200 (benchmarks/kernels_h200_20261130.json) and is the default.
FORWARD_CANDIDATES = (
    Launch(tokens=2),
    Launch(),
    Launch(tokens=1),
    Launch(tokens=8, warps=8),
    Launch(tokens=8, columns=512),
    Launch(tokens=4, columns=512),
    Launch(tokens=16, columns=256),
    Launch(tokens=2, columns=2048, warps=8),
    Launch(load_policy="evict_first"),
    Launch(tokens=2, load_policy="evict_first"),
)
BACKWARD_CANDIDATES = (
    Launch(tokens=1, columns=4096, warps=8),
    Launch(tokens=1),
    Launch(tokens=2),
    Launch(tokens=4, columns=512),
    Launch(tokens=4, columns=256),  # a warp for each token: no sums across warps
    Launch(tokens=8, columns=256, warps=8),
    Launch(tokens=1, columns=2048),
    Launch(tokens=1, columns=1024, load_policy="evict_first"),
    Launch(tokens=4, columns=256, load_policy="evict_first"),
)


def weighted_sum(
    rows_QH: jax.Array,
    weights_TK: jax.Array | None,
    place_TK: jax.Array,
    dtype: jnp.dtype,
    launch: Launch = FORWARD_CANDIDATES[0],
) -> jax.Array:
    """Sum over k ascending of weights_TK[t,k] * rows_QH[place_TK[t,k]] in float32, cast once to `dtype`.

    Places are int32; weights of None are all 1. Elements of 2 or 4 bytes, H a multiple of 8;
    NotImplementedError otherwise. No derivative of its own; see `combine_rows`.
    """
    call.check_rows(rows_QH)
    from .kernel import combine_rows_kernel

    (num_rows, width), (tokens, choices) = rows_QH.shape, place_TK.shape
    return call.triton_call(
        rows_QH,
        place_TK if weights_TK is None else weights_TK,  # something must stand there; it is not read
        place_TK,
        kernel=combine_rows_kernel,
        out_shape=jax.ShapeDtypeStruct((tokens, width), dtype),
        programs=call.ceil_div(tokens, launch.tokens) * call.ceil_div(width, launch.columns),
        num_warps=launch.warps,
        Q=num_rows,
        T=tokens,
        K=choices,
        H=width,
        WEIGHTED=weights_TK is not None,
        TOKENS=launch.tokens,
        COLUMNS=launch.columns,
        LOAD_POLICY=launch.load_policy,
    )


def sum_rows(rows_NH: jax.Array, places_MJ: jax.Array) -> jax.Array:
    """Float32 sum over j ascending of the rows at places_MJ (-1 for none), in the dtype of the rows."""
    return weighted_sum(rows_NH, None, places_MJ, rows_NH.dtype)


def combine_rows_gradient(
    d_out_TH: jax.Array,
    rows_QH: jax.Array,
    weights_TK: jax.Array,
    place_TK: jax.Array,
    assignment_Q: jax.Array,
    launch: Launch = BACKWARD_CANDIDATES[0],
) -> tuple[jax.Array, jax.Array]:
    """(gradient of the rows [Q,H] in their dtype, of the weights [T,K] in float32)."""
    call.check_rows(rows_QH)
    from .kernel import combine_rows_gradient_kernel

    (num_rows, width), (tokens, choices) = rows_QH.shape, place_TK.shape
    return call.triton_call(
        d_out_TH,
        rows_QH,
        weights_TK,
        place_TK,
        assignment_Q,
        kernel=combine_rows_gradient_kernel,
        out_shape=(
            jax.ShapeDtypeStruct((num_rows, width), rows_QH.dtype),
            jax.ShapeDtypeStruct((tokens, choices), jnp.float32),
        ),
        programs=call.ceil_div(tokens, launch.tokens) + call.ceil_div(num_rows, EMPTY_ROWS),
        num_warps=launch.warps,
        Q=num_rows,
        T=tokens,
        K=choices,
        H=width,
        TOKENS=launch.tokens,
        COLUMNS=launch.columns,
        EMPTY_ROWS=EMPTY_ROWS,
        EMPTY_COLUMNS=EMPTY_COLUMNS,
        LOAD_POLICY=launch.load_policy,
    )


combine_rows = derivatives.combining(weighted_sum, combine_rows_gradient)
