"""Moving rows by index: two gathers whose derivatives are gathers, so that no row is ever scatter-added.

Letters: N input rows, M output rows, J places of one row, T tokens, K choices, Q returned rows, H width.
An index of -1 means "no row": it reads as zeros and receives nothing, whatever the buffers contain.

Each is computed by XLA or by a GPU kernel (`implementations`); both read the same rows and sum in the same order.
"""

import functools

import jax
import jax.numpy as jnp

from ep_jax.ep import implementations


def take_rows(rows_NH: jax.Array, index_M: jax.Array) -> jax.Array:
    """rows_NH[index_M], zeros where the index is -1, by XLA. No derivative of its own; see `move_rows`."""
    index_M = jnp.where(index_M < 0, rows_NH.shape[0], index_M)
    return rows_NH.at[index_M].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def move_rows(rows_NH: jax.Array, source_M: jax.Array, places_NJ: jax.Array) -> jax.Array:
    """Output row m is input row source_M[m] (int32, -1 for zeros); dtype and width of the input.

    places_NJ is the inverse: the output rows that hold input row n (int32, -1 for none). The gradient of row n is the
    float32 sum of the output gradients at its places, in order of J.
    """
    return _move_rows(rows_NH, source_M, places_NJ, implementations.chosen())


def combine_rows(
    returned_QH: jax.Array, weights_TK: jax.Array, place_TK: jax.Array, assignment_Q: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Sum over k ascending of weights_TK[t,k] * returned_QH[place_TK[t,k]]; a place of -1 contributes zero.

    The sum runs in float32 (float64 for float64 rows) and is cast once to `dtype`. assignment_Q is the inverse
    of place_TK: t*K + k, or -1 for a row that no token takes; such rows get a zero gradient.
    """
    return _combine_rows(returned_QH, weights_TK, place_TK, assignment_Q, dtype, implementations.chosen())


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _move_rows(rows_NH, source_M, places_NJ, implementation):
    del places_NJ
    return _gather(rows_NH, source_M, implementation)


def _move_rows_forward(rows_NH, source_M, places_NJ, implementation):
    return _gather(rows_NH, source_M, implementation), places_NJ


def _move_rows_backward(implementation, places_NJ, gradient_MH):
    if places_NJ.shape[1] == 1:
        return _gather(gradient_MH, places_NJ[:, 0], implementation), None, None

    def kernel():
        from ep_jax_kernels.combine_rows.op import sum_rows

        return sum_rows(gradient_MH, places_NJ)

    def plain():
        wide = _sum_type(gradient_MH.dtype)
        terms = [take_rows(gradient_MH, places_NJ[:, j]).astype(wide) for j in range(places_NJ.shape[1])]
        return functools.reduce(jnp.add, terms).astype(gradient_MH.dtype)

    return implementations.first("sum of rows", implementation, kernel, plain), None, None


_move_rows.defvjp(_move_rows_forward, _move_rows_backward)


def _gather(rows_NH, index_M, implementation):
    def kernel():
        from ep_jax_kernels.gather_rows.op import gather_rows

        return gather_rows(rows_NH, index_M)

    return implementations.first("gather of rows", implementation, kernel, lambda: take_rows(rows_NH, index_M))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _combine_rows(returned_QH, weights_TK, place_TK, assignment_Q, dtype, implementation):
    del assignment_Q

    def kernel():
        from ep_jax_kernels.combine_rows.op import weighted_sum

        return weighted_sum(returned_QH, weights_TK, place_TK, dtype)

    def plain():
        wide = _sum_type(returned_QH.dtype)
        weights = jnp.where(place_TK < 0, 0, weights_TK).astype(wide)  # an invalid token's weight may be anything
        terms = [
            weights[:, k, None] * take_rows(returned_QH, place_TK[:, k]).astype(wide) for k in range(place_TK.shape[1])
        ]
        return functools.reduce(jnp.add, terms).astype(dtype)

    return implementations.first("combine", implementation, kernel, plain)


def _combine_rows_forward(returned_QH, weights_TK, place_TK, assignment_Q, dtype, implementation):
    residuals = returned_QH, weights_TK, place_TK, assignment_Q
    return _combine_rows(*residuals, dtype, implementation), residuals


def _combine_rows_backward(dtype, implementation, residuals, gradient_TH):
    del dtype
    returned_QH, weights_TK, place_TK, assignment_Q = residuals

    def kernel():
        from ep_jax_kernels.combine_rows.op import combine_rows_gradient

        return combine_rows_gradient(gradient_TH, *residuals)

    def plain():
        wide, choices = _sum_type(returned_QH.dtype), place_TK.shape[1]
        token_Q = jnp.where(assignment_Q < 0, -1, assignment_Q // choices)
        weight_Q = take_rows(weights_TK.reshape(-1, 1), assignment_Q).astype(wide)
        d_returned_QH = weight_Q * take_rows(gradient_TH, token_Q).astype(wide)
        d_weights = [
            jnp.sum(gradient_TH.astype(wide) * take_rows(returned_QH, place_TK[:, k]).astype(wide), axis=1)
            for k in range(choices)
        ]
        return d_returned_QH.astype(returned_QH.dtype), jnp.where(place_TK < 0, 0, jnp.stack(d_weights, axis=1))

    d_returned_QH, d_weights_TK = implementations.first("gradient of combine", implementation, kernel, plain)
    return d_returned_QH, d_weights_TK.astype(weights_TK.dtype), None, None


_combine_rows.defvjp(_combine_rows_forward, _combine_rows_backward)


def _sum_type(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)
