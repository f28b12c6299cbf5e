"""What combine_rows and its gradients are, in plain JAX: what runs where the kernel does not. Letters as in op.py.

Sums are float32, of float64 rows float64.
"""

import functools

import jax
import jax.numpy as jnp

from .. import derivatives
from ..gather_rows.reference import gather_rows
from ..index import quotient


def weighted_sum(rows_QH: jax.Array, weights_TK: jax.Array, place_TK: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Sum over k ascending of weights_TK[t,k] * rows_QH[place_TK[t,k]], cast once. No derivative of its own."""
    wide = jnp.promote_types(rows_QH.dtype, jnp.float32)
    weights_TK = jnp.where(place_TK < 0, 0, weights_TK).astype(wide)  # that of nothing may be anything
    terms = [
        weights_TK[:, k, None] * gather_rows(rows_QH, place_TK[:, k]).astype(wide) for k in range(place_TK.shape[1])
    ]
    return functools.reduce(jnp.add, terms).astype(dtype)


def combine_rows_gradient(
    d_out_TH: jax.Array, rows_QH: jax.Array, weights_TK: jax.Array, place_TK: jax.Array, assignment_Q: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(gradient of the rows in their dtype, of the weights in the dtype of the sums)."""
    wide, choices = jnp.promote_types(rows_QH.dtype, jnp.float32), place_TK.shape[1]
    token_Q = quotient(assignment_Q, choices)
    weight_Q1 = gather_rows(weights_TK.reshape(-1, 1), assignment_Q).astype(wide)
    d_rows_QH = (weight_Q1 * gather_rows(d_out_TH, token_Q).astype(wide)).astype(rows_QH.dtype)
    d_weights = [
        jnp.sum(d_out_TH.astype(wide) * gather_rows(rows_QH, place_TK[:, k]).astype(wide), axis=1)
        for k in range(choices)
    ]
    return d_rows_QH, jnp.where(place_TK < 0, 0, jnp.stack(d_weights, axis=1))


combine_rows = derivatives.combining(weighted_sum, combine_rows_gradient)
