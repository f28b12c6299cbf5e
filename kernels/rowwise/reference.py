"""The two movements in plain JAX: an all-gather stands in for reaching into a peer's memory. Letters as in op.py."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ..index import quotient


def put_rows(rows_TH: jax.Array, place_TK: jax.Array, num_rows: int, axis: str) -> jax.Array:
    """[N,H] of this shard, zero where nobody puts a row."""
    source_N, rows = source_of_rows(place_TK, num_rows, axis), lax.all_gather(rows_TH, axis, tiled=True)
    return _take(rows, quotient(source_N, place_TK.shape[1]))


def get_sum(rows_NH: jax.Array, place_TK: jax.Array, axis: str) -> jax.Array:
    """[T,H] in the rows' dtype: float32 sum over k ascending, cast once."""
    rows = lax.all_gather(rows_NH, axis, tiled=True)
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    terms = [_take(rows, place_TK[:, choice]).astype(wide) for choice in range(place_TK.shape[1])]
    return functools.reduce(jnp.add, terms).astype(rows.dtype)


def get_numbers(values_N: jax.Array, place_TK: jax.Array, axis: str) -> jax.Array:
    """[T,K] numbers at their places, zero for a place of -1."""
    return _take(lax.all_gather(values_N, axis, tiled=True), place_TK)


def source_of_rows(place_TK: jax.Array, num_rows: int, axis: str) -> jax.Array:
    """int32 [N]: the place in [S,T,K] that each row of this shard's buffer belongs to, -1 for none."""
    place_A = lax.all_gather(place_TK, axis, tiled=True).reshape(-1)
    row_A = place_A - lax.axis_index(axis) * num_rows
    row_A = jnp.where((row_A >= 0) & (row_A < num_rows), row_A, num_rows)  # -1 is negative on every shard
    return jnp.full((num_rows,), -1, jnp.int32).at[row_A].set(jnp.arange(row_A.size, dtype=jnp.int32), mode="drop")


def _take(array: jax.Array, index: jax.Array) -> jax.Array:
    """array[index] along the first axis, zeros where the index is -1."""
    index = jnp.where(index < 0, array.shape[0], index)
    return array.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)
