"""SwiGLU experts on grouped rows in plain JAX. Letters as in op.py."""

import jax
import jax.numpy as jnp

from ..grouped_matmul.reference import grouped_matmul
from ..grouped_matmul.tiles import Groups


def gate_up(rows_RH: jax.Array, w_gate_up_eH2F: jax.Array, groups: Groups) -> tuple[jax.Array, jax.Array]:
    """(hidden [R,2F], middle [R,F]); zeros in rows that nobody owns."""
    hidden_R2F = grouped_matmul(rows_RH, w_gate_up_eH2F, groups)
    gate, up = jnp.split(hidden_R2F.astype(jnp.float32), 2, axis=1)
    return hidden_R2F, (jax.nn.silu(gate) * up).astype(hidden_R2F.dtype)


def gate_up_gradient(d_out_RH: jax.Array, w_down_eFH: jax.Array, hidden_R2F: jax.Array, groups: Groups) -> jax.Array:
    """d_hidden [R,2F]; zeros in rows that nobody owns, where the hidden rows are zeros."""
    d_middle_RF = grouped_matmul(d_out_RH, w_down_eFH.swapaxes(1, 2), groups).astype(jnp.float32)
    gate, up = jnp.split(hidden_R2F.astype(jnp.float32), 2, axis=1)
    sigmoid = jax.nn.sigmoid(gate)
    d_gate = d_middle_RF * up * sigmoid * (1 + gate * (1 - sigmoid))
    return jnp.concatenate([d_gate, d_middle_RF * gate * sigmoid], axis=1).astype(hidden_R2F.dtype)


def grouped_mlp(rows_RH: jax.Array, w_gate_up_eH2F: jax.Array, w_down_eFH: jax.Array, groups: Groups) -> jax.Array:
    """down(silu(gate(x)) * up(x)) of each owned row by its expert; zeros elsewhere."""
    return grouped_matmul(gate_up(rows_RH, w_gate_up_eH2F, groups)[1], w_down_eFH, groups)
