"""What quantize_rows and restore_rows are, in plain JAX: what runs where the kernels do not. Letters as in op.py."""

import jax
import jax.numpy as jnp

from ..gather_rows.reference import gather_rows

FLOAT8 = jnp.float8_e4m3fn
LARGEST = 448.0  # of e4m3, which has NaN and no infinity
LEAST_SCALE = 2.0**-126  # the smallest normal float32: a smaller scale may be flushed to zero


def quantize_rows(rows_NH: jax.Array, index_M: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(e4m3 [M,H], float32 scale_M) of rows_NH[index_M] (index int32), so that row = e4m3 row * scale.

    A scale is the row's largest absolute value / LARGEST, at least LEAST_SCALE; 1 for a row of zeros and for an index
    outside 0 .. N-1, which gives zeros. A row that holds NaN or an infinity gets the scale NaN: all of it comes back
    as NaN. Rounds to nearest, ties to even, from float32; subnormal numbers may count as zero. No derivative.
    """
    rows_NH = rows_NH.astype(jnp.float32)
    sizes_NH = jnp.abs(rows_NH)
    largest_N = jnp.max(jnp.where(sizes_NH < jnp.inf, sizes_NH, jnp.inf), axis=1)
    scale_N = jnp.maximum(largest_N * (1 / LARGEST), LEAST_SCALE)
    scale_N = jnp.where(largest_N < jnp.inf, jnp.where(largest_N > 0, scale_N, 1.0), jnp.nan)
    inverse_N = 1 / scale_N
    # Each row is rounded once, however often it is asked for.
    bytes_NH = (rows_NH * inverse_N[:, None]).astype(FLOAT8)
    held_M = (index_M >= 0) & (index_M < rows_NH.shape[0])
    return gather_rows(bytes_NH, index_M), jnp.where(held_M, gather_rows(scale_N[:, None], index_M)[:, 0], 1.0)


def restore_rows(bytes_NH: jax.Array, index_M: jax.Array, scale_M: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """bytes_NH[index_M] * scale_M in float32, cast once to `dtype`; zeros where the index is outside 0 .. N-1.

    Scales there, and rows that no index names, may hold anything. No derivative.
    """
    held_M = (index_M >= 0) & (index_M < bytes_NH.shape[0])
    rows_MH = gather_rows(bytes_NH, index_M).astype(jnp.float32) * jnp.where(held_M, scale_M, 0)[:, None]
    return rows_MH.astype(dtype)
