"""Moving rows by index: gathers whose derivatives are gathers, so that no row is ever scatter-added.

Letters: N input rows, M output rows, J places of one row, T tokens, K choices, Q returned rows, H width.
An index of -1 means "no row": it reads as zeros and receives nothing, whatever the buffers contain.

Each is computed by XLA or by a GPU kernel (`implementations`), its derivative by the same; both read the same rows and
sum in the same order.
"""

import jax
import jax.numpy as jnp
from ep_jax_kernels.combine_rows import op as combine_op
from ep_jax_kernels.combine_rows import reference as combine_by_xla
from ep_jax_kernels.gather_rows import op as gather_op
from ep_jax_kernels.gather_rows import reference as gather_by_xla

from ep_jax.ep import implementations

# rows_NH[index_M], zeros where the index is -1, by XLA. No derivative of its own; see `move_rows`.
take_rows = gather_by_xla.gather_rows


def move_rows(rows_NH: jax.Array, source_M: jax.Array, places_NJ: jax.Array) -> jax.Array:
    """Output row m is input row source_M[m] (int32, -1 for zeros); dtype and width of the input.

    places_NJ is the inverse, exactly, as kernels may write by it: the output rows that hold input row n (int32, -1 for
    none). The gradient of row n is the float32 sum (float64 of float64 rows) of the output gradients at its places, in
    order of J.
    """
    return implementations.first(
        "moving rows", gather_op.move_rows, gather_by_xla.move_rows, rows_NH, source_M, places_NJ
    )


def move_numbers(values_N: jax.Array, source_M: jax.Array, places_NJ: jax.Array) -> jax.Array:
    """`move_rows` of single numbers, [N] to [M]; by XLA, as kernels move rows of 16 bytes and more."""
    return gather_by_xla.move_rows(values_N[:, None], source_M, places_NJ)[:, 0]


def sum_moved_rows(rows_NH: jax.Array, places_MJ: jax.Array, source_N: jax.Array) -> jax.Array:
    """Output row m is the float32 sum, in order of J, of the rows at places_MJ[m] (int32, -1 for none), cast once.

    source_N is the inverse, exactly: the output row that takes input row n (int32, -1 for none, which gets a zero
    gradient). The adjoint of `move_rows`.
    """
    return implementations.first(
        "summing rows", gather_op.sum_moved_rows, gather_by_xla.sum_moved_rows, rows_NH, places_MJ, source_N
    )


def combine_rows(
    returned_QH: jax.Array, weights_TK: jax.Array, place_TK: jax.Array, assignment_Q: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Sum over k ascending of weights_TK[t,k] * returned_QH[place_TK[t,k]]; a place of -1 contributes zero.

    The sum runs in float32 (float64 for float64 rows) and is cast once to `dtype`. assignment_Q is the inverse
    of place_TK: t*K + k, or -1 for a row that no token takes; such rows get a zero gradient.
    """
    arguments = returned_QH, weights_TK, place_TK, assignment_Q, dtype
    return implementations.first("combining rows", combine_op.combine_rows, combine_by_xla.combine_rows, *arguments)
