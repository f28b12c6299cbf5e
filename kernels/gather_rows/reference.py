"""What gather_rows does, in plain JAX; what ep_jax/ep/rows.py does today. Letters as in op.py."""

import jax
import jax.numpy as jnp


def gather_rows(rows_NH: jax.Array, index_M: jax.Array) -> jax.Array:
    """rows_NH[index_M], zeros where the index is outside 0 .. N-1."""
    index_M = jnp.where(index_M < 0, rows_NH.shape[0], index_M)
    return rows_NH.at[index_M].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def sum_rows(rows_NH: jax.Array, places_MJ: jax.Array) -> jax.Array:
    """Float32 sum over j ascending of the rows at places_MJ (-1 for none), in the dtype of the rows."""
    total_MH = jnp.zeros((places_MJ.shape[0], rows_NH.shape[1]), jnp.float32)
    for j in range(places_MJ.shape[1]):
        total_MH += gather_rows(rows_NH, places_MJ[:, j]).astype(jnp.float32)
    return total_MH.astype(rows_NH.dtype)
