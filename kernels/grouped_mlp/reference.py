"""SwiGLU experts on grouped rows in plain JAX. Letters as in op.py."""

import jax

from ..grouped_matmul.reference import grouped_matmul
from ..grouped_matmul.tiles import Groups
from ..swiglu.reference import swiglu


def grouped_mlp(
    rows_RH: jax.Array,
    w_gate_up_eH2F: jax.Array,
    w_down_eFH: jax.Array,
    groups: Groups,
    row_weights_R: jax.Array | None = None,
) -> jax.Array:
    """down(silu(gate(x)) * up(x)) of each owned row by its expert, weighted; zeros elsewhere."""
    hidden_R2F = grouped_matmul(rows_RH, w_gate_up_eH2F, groups)
    return grouped_matmul(swiglu(hidden_R2F, row_weights_R), w_down_eFH, groups)
