"""The routed experts: SwiGLU over rows grouped by expert. Knows nothing of transports, routes or drops.

Letters: e local experts, R rows per expert, N rows in all, H routed width, F expert hidden width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ep_jax.ep import blocks


class CapacityRows(NamedTuple):
    """The same number of rows for each expert; rows that hold no token are zero."""

    rows_eRH: jax.Array


class RaggedRows(NamedTuple):
    """Rows of expert 0, then 1, and so on; rows past sum(sizes_e) are never read."""

    rows_NH: jax.Array
    sizes_e: jax.Array  # int32


ExpertRows = CapacityRows | RaggedRows


def swiglu_experts(expert_rows: ExpertRows, w_gate_up_eH2F: jax.Array, w_down_eFH: jax.Array) -> jax.Array:
    """down(silu(gate(x)) * up(x)) of each row by its expert; the layout and dtype of the rows.

    The first F columns of w_gate_up are the gate. Matmuls accumulate in float32.
    """
    if isinstance(expert_rows, CapacityRows):
        hidden_eR2F = jnp.einsum("erh,ehf->erf", expert_rows.rows_eRH, w_gate_up_eH2F)
        return jnp.einsum("erf,efh->erh", _gate(hidden_eR2F), w_down_eFH)
    rows_NH, sizes_e = expert_rows
    if blocks.worthwhile(rows_NH.shape[0], *w_gate_up_eH2F.shape):
        plan = blocks.plan_blocks(sizes_e, rows_NH.shape[0])
        w_gate_up, w_down = (blocks.weights_of_blocks(w, plan) for w in (w_gate_up_eH2F, w_down_eFH))
        hidden_bB2F = jnp.einsum("brh,bhf->brf", blocks.to_blocks(rows_NH, plan), w_gate_up)
        return blocks.from_blocks(jnp.einsum("brf,bfh->brh", _gate(hidden_bB2F), w_down), plan)
    # Selects, not products: what lies past the last group may be anything, and must not reach a gradient either.
    held_N1 = (jnp.arange(rows_NH.shape[0], dtype=jnp.int32) < jnp.sum(sizes_e))[:, None]
    rows_NH = jnp.where(held_N1, rows_NH, 0)
    hidden_N2F = lax.ragged_dot(rows_NH, w_gate_up_eH2F, sizes_e)
    out_NH = lax.ragged_dot(_gate(hidden_N2F), w_down_eFH, sizes_e)
    return jnp.where(held_N1, out_NH, 0)


def _gate(hidden_2F: jax.Array) -> jax.Array:
    gate, up = jnp.split(hidden_2F, 2, axis=-1)
    return jax.nn.silu(gate) * up
