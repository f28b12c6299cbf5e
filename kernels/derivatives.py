"""The derivatives of moving rows and of combining them, stated once, whoever computes: a GPU kernel or XLA.

Both operations are gathers whose derivatives are gathers, so no row is ever scatter-added. A derivative is computed by
what computed its operation, and takes every array that the operation took: nothing has to be chosen again.

Letters: N input rows, M output rows, J places of one row, T tokens, K choices, Q returned rows, H width.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from . import call

# fill_rows(rows_NH, source_M, places_NJ) is gather_rows(rows_NH, source_M), told the inverse as well.
Fill = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def moving(
    fill_rows: Fill,
    gather_rows: Callable[[jax.Array, jax.Array], jax.Array],
    sum_rows: Callable[[jax.Array, jax.Array], jax.Array],
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """move_rows(rows_NH, source_M, places_NJ) by these, as op.py and reference.py of gather_rows have them."""

    @jax.custom_vjp
    def move(rows_NH, source_M, places_NJ):
        return fill_rows(rows_NH, source_M, places_NJ)

    def forward(rows_NH, source_M, places_NJ):
        return fill_rows(rows_NH, source_M, places_NJ), places_NJ

    def backward(places_NJ, d_out_MH):
        once = places_NJ.shape[1] == 1
        d_rows_NH = gather_rows(d_out_MH, places_NJ[:, 0]) if once else sum_rows(d_out_MH, places_NJ)
        return d_rows_NH, None, None

    move.defvjp(forward, backward)

    def move_rows(rows_NH: jax.Array, source_M: jax.Array, places_NJ: jax.Array) -> jax.Array:
        """Output row m is input row source_M[m] (int32, -1 for zeros); dtype and width of the input.

        places_NJ is the inverse: the output rows that hold input row n (int32, -1 for none). The gradient of row n is
        the float32 sum of the output gradients at its places, in order of J.
        """
        return move(*call.vary_alike(rows_NH, source_M, places_NJ))

    return move_rows


def summing(
    sum_rows: Callable[[jax.Array, jax.Array], jax.Array], fill_rows: Fill
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """sum_moved_rows(rows_NH, places_MJ, source_N) by these two: the adjoint of `moving`."""

    @jax.custom_vjp
    def add(rows_NH, places_MJ, source_N):
        del source_N
        return sum_rows(rows_NH, places_MJ)

    def forward(rows_NH, places_MJ, source_N):
        return sum_rows(rows_NH, places_MJ), (source_N, places_MJ)

    def backward(maps, d_out_MH):
        return fill_rows(d_out_MH, *maps), None, None

    add.defvjp(forward, backward)

    def sum_moved_rows(rows_NH: jax.Array, places_MJ: jax.Array, source_N: jax.Array) -> jax.Array:
        """Output row m is the float32 sum, in order of J, of the rows at places_MJ[m] (int32, -1 for none), cast once.

        source_N is the inverse: the output row that takes input row n (int32, -1 for none, which gets a zero gradient).
        """
        return add(*call.vary_alike(rows_NH, places_MJ, source_N))

    return sum_moved_rows


def combining(
    weighted_sum: Callable[[jax.Array, jax.Array, jax.Array, jnp.dtype], jax.Array],
    combine_rows_gradient: Callable[..., tuple[jax.Array, jax.Array]],
) -> Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jnp.dtype], jax.Array]:
    """combine_rows(returned_QH, weights_TK, place_TK, assignment_Q, dtype) by these two, as op.py and reference.py of
    combine_rows have them.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
    def combine(returned_QH, weights_TK, place_TK, assignment_Q, dtype):
        del assignment_Q
        return weighted_sum(returned_QH, weights_TK, place_TK, dtype)

    def forward(returned_QH, weights_TK, place_TK, assignment_Q, dtype):
        residuals = returned_QH, weights_TK, place_TK, assignment_Q
        return weighted_sum(returned_QH, weights_TK, place_TK, dtype), residuals

    def backward(dtype, residuals, d_out_TH):
        del dtype
        d_returned_QH, d_weights_TK = combine_rows_gradient(d_out_TH, *residuals)
        return d_returned_QH, d_weights_TK.astype(residuals[1].dtype), None, None

    combine.defvjp(forward, backward)

    def combine_rows(
        returned_QH: jax.Array, weights_TK: jax.Array, place_TK: jax.Array, assignment_Q: jax.Array, dtype: jnp.dtype
    ) -> jax.Array:
        """Sum over k ascending of weights_TK[t,k] * returned_QH[place_TK[t,k]] in float32, cast once to `dtype`.

        A place of -1 contributes zero, whatever its weight is. place_TK and assignment_Q are int32 and inverse to each
        other: assignment_Q is t*K + k, or -1 for a row that no token takes; such rows get a zero gradient.
        """
        return combine(*call.vary_alike(returned_QH, weights_TK, place_TK, assignment_Q), dtype)

    return combine_rows
