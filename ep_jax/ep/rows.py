"""Moving rows by index: two gathers whose derivatives are gathers, so that no row is ever scatter-added.

Letters: N input rows, M output rows, J places of one row, T tokens, K choices, Q returned rows, H width.
An index of -1 means "no row": it reads as zeros and receives nothing, whatever the buffers contain.
"""

import functools

import jax
import jax.numpy as jnp


def take_rows(rows_NH: jax.Array, index_M: jax.Array) -> jax.Array:
    """rows_NH[index_M], zeros where the index is -1. No derivative of its own; see `move_rows`."""
    index_M = jnp.where(index_M < 0, rows_NH.shape[0], index_M)
    return rows_NH.at[index_M].get(mode="fill", fill_value=0, wrap_negative_indices=False)


@jax.custom_vjp
def move_rows(rows_NH: jax.Array, source_M: jax.Array, places_NJ: jax.Array) -> jax.Array:
    """Output row m is input row source_M[m] (int32, -1 for zeros); dtype and width of the input.

    places_NJ is the inverse: the output rows that hold input row n (int32, -1 for none). The gradient of row n is the
    float32 sum of the output gradients at its places, in order of J.
    """
    del places_NJ
    return take_rows(rows_NH, source_M)


def _move_rows_forward(rows_NH, source_M, places_NJ):
    return move_rows(rows_NH, source_M, places_NJ), places_NJ


def _move_rows_backward(places_NJ, gradient_MH):
    wide = _sum_type(gradient_MH.dtype)
    if places_NJ.shape[1] == 1:
        return take_rows(gradient_MH, places_NJ[:, 0]), None, None
    terms = [take_rows(gradient_MH, places_NJ[:, j]).astype(wide) for j in range(places_NJ.shape[1])]
    return functools.reduce(jnp.add, terms).astype(gradient_MH.dtype), None, None


move_rows.defvjp(_move_rows_forward, _move_rows_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def combine_rows(
    returned_QH: jax.Array, weights_TK: jax.Array, place_TK: jax.Array, assignment_Q: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Sum over k ascending of weights_TK[t,k] * returned_QH[place_TK[t,k]]; a place of -1 contributes zero.

    The sum runs in float32 (float64 for float64 rows) and is cast once to `dtype`. assignment_Q is the inverse
    of place_TK: t*K + k, or -1 for a row that no token takes; such rows get a zero gradient.
    """
    del assignment_Q
    wide = _sum_type(returned_QH.dtype)
    weights_TK = jnp.where(place_TK < 0, 0, weights_TK).astype(wide)  # an invalid token's weight may be anything
    terms = [
        weights_TK[:, k, None] * take_rows(returned_QH, place_TK[:, k]).astype(wide) for k in range(place_TK.shape[1])
    ]
    return functools.reduce(jnp.add, terms).astype(dtype)


def _combine_rows_forward(returned_QH, weights_TK, place_TK, assignment_Q, dtype):
    return combine_rows(returned_QH, weights_TK, place_TK, assignment_Q, dtype), (
        returned_QH,
        weights_TK,
        place_TK,
        assignment_Q,
    )


def _combine_rows_backward(dtype, residuals, gradient_TH):
    returned_QH, weights_TK, place_TK, assignment_Q = residuals
    wide, choices = _sum_type(returned_QH.dtype), place_TK.shape[1]
    token_Q = jnp.where(assignment_Q < 0, -1, assignment_Q // choices)
    weight_Q = take_rows(weights_TK.reshape(-1, 1), assignment_Q).astype(wide)
    d_returned_QH = weight_Q * take_rows(gradient_TH, token_Q).astype(wide)
    d_weights = [
        jnp.sum(gradient_TH.astype(wide) * take_rows(returned_QH, place_TK[:, k]).astype(wide), axis=1)
        for k in range(choices)
    ]
    d_weights_TK = jnp.where(place_TK < 0, 0, jnp.stack(d_weights, axis=1)).astype(weights_TK.dtype)
    return d_returned_QH.astype(returned_QH.dtype), d_weights_TK, None, None


combine_rows.defvjp(_combine_rows_forward, _combine_rows_backward)


def _sum_type(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)
