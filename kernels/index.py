"""Indices where -1 means "none"."""

import jax
import jax.numpy as jnp


def quotient(index: jax.Array, size: int) -> jax.Array:
    """index // size of int32 indices of any shape; -1 stays -1."""
    return jnp.where(index < 0, -1, index // size)
