"""What combine_rows and its gradients are, in plain JAX; what ep_jax/ep/rows.py does today. Letters as in op.py."""

import jax
import jax.numpy as jnp

from ..gather_rows.reference import gather_rows


def combine_rows(rows_QH: jax.Array, weights_TK: jax.Array, place_TK: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 sum over k ascending of weights_TK[t,k] * rows_QH[place_TK[t,k]], cast once."""
    weights_TK = jnp.where(place_TK < 0, 0, weights_TK).astype(jnp.float32)
    total_TH = jnp.zeros((place_TK.shape[0], rows_QH.shape[1]), jnp.float32)
    for k in range(place_TK.shape[1]):
        total_TH += weights_TK[:, k, None] * gather_rows(rows_QH, place_TK[:, k]).astype(jnp.float32)
    return total_TH.astype(dtype)


def combine_rows_gradient(
    d_out_TH: jax.Array, rows_QH: jax.Array, weights_TK: jax.Array, place_TK: jax.Array, assignment_Q: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(gradient of the rows in their dtype, of the weights in float32)."""
    choices = place_TK.shape[1]
    token_Q = jnp.where(assignment_Q < 0, -1, assignment_Q // choices)
    weight_Q1 = gather_rows(weights_TK.reshape(-1, 1), assignment_Q).astype(jnp.float32)
    d_rows_QH = (weight_Q1 * gather_rows(d_out_TH, token_Q).astype(jnp.float32)).astype(rows_QH.dtype)
    d_weights = [
        jnp.sum(d_out_TH.astype(jnp.float32) * gather_rows(rows_QH, place_TK[:, k]).astype(jnp.float32), axis=1)
        for k in range(choices)
    ]
    return d_rows_QH, jnp.where(place_TK < 0, 0, jnp.stack(d_weights, axis=1))
