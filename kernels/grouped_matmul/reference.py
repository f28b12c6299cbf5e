"""Grouped products in plain JAX, one expert after the other on all rows under a mask. Letters as in op.py."""

import jax
import jax.numpy as jnp
from jax import lax

from .tiles import Groups


def grouped_matmul(rows_RK: jax.Array, weights_eKN: jax.Array, groups: Groups) -> jax.Array:
    """Each owned row times its expert's matrix; zeros in rows that nobody owns."""

    def add(out_RN, expert):
        weights_KN, start, size = expert
        held_R1 = _held(rows_RK.shape[0], start, size)
        product_RN = jnp.dot(jnp.where(held_R1, rows_RK, 0), weights_KN, preferred_element_type=jnp.float32)
        return jnp.where(held_R1, product_RN.astype(out_RN.dtype), out_RN), None

    out_RN = jnp.zeros((rows_RK.shape[0], weights_eKN.shape[2]), rows_RK.dtype)
    return lax.scan(add, out_RN, (weights_eKN, *groups))[0]


def grouped_weight_gradient(rows_RK: jax.Array, d_out_RN: jax.Array, groups: Groups, dtype: jnp.dtype) -> jax.Array:
    """[e,K,N]: of each expert, the sum over its rows of outer products."""

    def of_expert(group):
        held_R1 = _held(rows_RK.shape[0], *group)
        rows, d_out = jnp.where(held_R1, rows_RK, 0), jnp.where(held_R1, d_out_RN, 0)
        return jnp.einsum("rk,rn->kn", rows, d_out, preferred_element_type=jnp.float32).astype(dtype)

    return lax.map(of_expert, groups)


def _held(num_rows: int, start: jax.Array, size: jax.Array) -> jax.Array:
    row_R1 = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    return (row_R1 >= start) & (row_R1 < start + size)
