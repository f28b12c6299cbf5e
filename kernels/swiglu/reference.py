"""SwiGLU and its gradient in plain JAX, of all rows. Letters as in op.py."""

import jax
import jax.numpy as jnp


def swiglu(hidden_R2F: jax.Array, weights_R: jax.Array | None = None) -> jax.Array:
    """silu(gate) * up [R,F] in float32, weighted, rounded once."""
    gate, up = jnp.split(hidden_R2F.astype(jnp.float32), 2, axis=1)
    middle_RF = jax.nn.silu(gate) * up
    middle_RF = middle_RF if weights_R is None else weights_R[:, None] * middle_RF
    return middle_RF.astype(hidden_R2F.dtype)


def swiglu_gradient(
    hidden_R2F: jax.Array, d_middle_RF: jax.Array, weights_R: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """(d_hidden [R,2F], d_weights float32 [R] or None)."""
    gate, up = jnp.split(hidden_R2F.astype(jnp.float32), 2, axis=1)
    d_out_RF, sigmoid = d_middle_RF.astype(jnp.float32), jax.nn.sigmoid(gate)
    d_middle_RF = d_out_RF if weights_R is None else weights_R[:, None] * d_out_RF
    d_gate = d_middle_RF * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_hidden_R2F = jnp.concatenate([d_gate, d_middle_RF * gate * sigmoid], axis=1).astype(hidden_R2F.dtype)
    return d_hidden_R2F, None if weights_R is None else jnp.sum(d_out_RF * gate * sigmoid * up, axis=1)
