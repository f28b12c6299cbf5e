"""Rotary position embedding: the first half of a head is rotated against the second half.

Shapes: b sequences, L tokens, N heads, h head width.
"""

import jax
import jax.numpy as jnp


def rotate(x_bLNh: jax.Array, positions_bL: jax.Array, theta: float) -> jax.Array:
    """Rotates pair (i, i + h/2) of each head by position * theta^(-2i/h), in float32; returns the dtype of x.

    Positions restart in every document, so the rotation between two tokens of a document is their distance.
    """
    half = x_bLNh.shape[-1] // 2
    frequencies_h = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_bL1h = positions_bL.astype(jnp.float32)[:, :, None, None] * frequencies_h[None, None, None, :]
    cos, sin = jnp.cos(angles_bL1h), jnp.sin(angles_bL1h)
    first, second = jnp.split(x_bLNh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_bLNh.dtype)
