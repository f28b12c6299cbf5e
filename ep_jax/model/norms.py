"""RMSNorm in float32."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale_D: jax.Array, epsilon: float) -> jax.Array:
    """Divides the last axis of x [..., D] by its root mean square and scales it; returns the dtype of x."""
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    scale = jnp.expand_dims(scale_D.astype(jnp.float32), range(x.ndim - 1))
    return (x32 * jax.lax.rsqrt(mean_square + epsilon) * scale).astype(x.dtype)
