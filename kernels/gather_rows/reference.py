"""What op.py's functions of the same names are, in plain JAX: what runs where the kernel does not. Letters as there."""

import functools

import jax
import jax.numpy as jnp

from .. import derivatives


def gather_rows(rows_NH: jax.Array, index_M: jax.Array) -> jax.Array:
    """rows_NH[index_M], zeros where the index is outside 0 .. N-1. No derivative of its own; see `move_rows`."""
    index_M = jnp.where(index_M < 0, rows_NH.shape[0], index_M)
    return rows_NH.at[index_M].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def sum_rows(rows_NH: jax.Array, places_MJ: jax.Array) -> jax.Array:
    """Float32 sum over j ascending of the rows at places_MJ (-1 for none), in the dtype of the rows.

    Of float64 rows the sum is float64.
    """
    wide = jnp.promote_types(rows_NH.dtype, jnp.float32)
    terms = [gather_rows(rows_NH, places_MJ[:, j]).astype(wide) for j in range(places_MJ.shape[1])]
    return functools.reduce(jnp.add, terms).astype(rows_NH.dtype)


def _fill_rows(rows_NH: jax.Array, source_M: jax.Array, places_NJ: jax.Array) -> jax.Array:
    del places_NJ
    return gather_rows(rows_NH, source_M)


move_rows = derivatives.moving(_fill_rows, gather_rows, sum_rows)
sum_moved_rows = derivatives.summing(sum_rows, _fill_rows)
