"""The routed experts: SwiGLU over rows grouped by expert. Knows nothing of transports, routes or drops.

Letters: e local experts, R rows per expert, N rows in all, H routed width, F expert hidden width.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ep_jax_kernels.grouped_matmul.tiles import ragged_groups
from ep_jax_kernels.grouped_mlp.op import capacity_mlp, grouped_mlp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_jax.ep import blocks, implementations


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CapacityRows:
    """The same number of rows for each expert; rows that hold no token are zero."""

    rows_eRH: jax.Array
    sizes_e: jax.Array | None = None  # int32: an expert's tokens are in its first rows; None: they may be in any
    # Mean of sizes_e on balanced routing, known without counts; whether padding is worth skipping depends on it.
    expected_rows: float = dataclasses.field(default=0.0, metadata=dict(static=True))
    weights_eR: jax.Array | None = None  # float32, as of RaggedRows; zero where no token is


class RaggedRows(NamedTuple):
    """Rows of expert 0, then 1, and so on; rows past sum(sizes_e) are never read."""

    rows_NH: jax.Array
    sizes_e: jax.Array  # int32
    weights_N: jax.Array | None = None  # float32, multiply the results; None: the results come out as they are


ExpertRows = CapacityRows | RaggedRows


def swiglu_experts(expert_rows: ExpertRows, w_gate_up_eH2F: jax.Array, w_down_eFH: jax.Array) -> jax.Array:
    """down(silu(gate(x)) * up(x)) of each row by its expert; the layout and dtype of the rows.

    The first F columns of w_gate_up are the gate. Matmuls accumulate in float32. Rows of the result that hold no token
    may be anything where a kernel computes them, and zero otherwise.
    """

    return implementations.first("experts", _by_kernel, _by_xla, expert_rows, w_gate_up_eH2F, w_down_eFH)


def _by_kernel(expert_rows: ExpertRows, w_gate_up_eH2F: jax.Array, w_down_eFH: jax.Array) -> jax.Array:
    if isinstance(expert_rows, RaggedRows):
        rows_NH, sizes_e, weights_N = expert_rows
        return grouped_mlp(rows_NH, w_gate_up_eH2F, w_down_eFH, ragged_groups(sizes_e), weights_N)
    if expert_rows.sizes_e is None:
        raise NotImplementedError("an expert's tokens are not in its first rows")
    if expert_rows.rows_eRH.dtype == jnp.float32:  # exact products without tensor cores: padding costs less than that
        raise NotImplementedError("float32 rows at a fixed distance")
    return capacity_mlp(
        expert_rows.rows_eRH,
        w_gate_up_eH2F,
        w_down_eFH,
        expert_rows.sizes_e,
        expert_rows.expected_rows,
        expert_rows.weights_eR,
    )


def _by_xla(expert_rows: ExpertRows, w_gate_up_eH2F: jax.Array, w_down_eFH: jax.Array) -> jax.Array:
    if isinstance(expert_rows, RaggedRows):
        return _ragged(expert_rows, w_gate_up_eH2F, w_down_eFH)
    hidden_eR2F = _named(jnp.einsum("erh,ehf->erf", expert_rows.rows_eRH, w_gate_up_eH2F))
    return jnp.einsum("erf,efh->erh", _weighted(_gate(hidden_eR2F), expert_rows.weights_eR), w_down_eFH)


def _ragged(expert_rows: RaggedRows, w_gate_up_eH2F: jax.Array, w_down_eFH: jax.Array) -> jax.Array:
    rows_NH, sizes_e, weights_N = expert_rows
    if blocks.worthwhile(rows_NH.shape[0], *w_gate_up_eH2F.shape):
        plan = blocks.plan_blocks(sizes_e, rows_NH.shape[0])
        w_gate_up, w_down = (blocks.weights_of_blocks(w, plan) for w in (w_gate_up_eH2F, w_down_eFH))
        hidden_bB2F = _named(jnp.einsum("brh,bhf->brf", blocks.to_blocks(rows_NH, plan), w_gate_up))
        weights_bB = None if weights_N is None else blocks.to_blocks(weights_N[:, None], plan)[..., 0]
        return blocks.from_blocks(jnp.einsum("brf,bfh->brh", _weighted(_gate(hidden_bB2F), weights_bB), w_down), plan)
    # Selects, not products: what lies past the last group may be anything, and must not reach a gradient either.
    held_N1 = (jnp.arange(rows_NH.shape[0], dtype=jnp.int32) < jnp.sum(sizes_e))[:, None]
    rows_NH = jnp.where(held_N1, rows_NH, 0)
    hidden_N2F = _named(lax.ragged_dot(rows_NH, w_gate_up_eH2F, sizes_e))
    weights_N = None if weights_N is None else jnp.where(held_N1[:, 0], weights_N, 0)
    middle_NF = _weighted(_gate(hidden_N2F), weights_N)
    return jnp.where(held_N1, lax.ragged_dot(middle_NF, w_down_eFH, sizes_e), 0)


def _named(hidden: jax.Array) -> jax.Array:
    """A name by which a remat policy may keep it."""
    return checkpoint_name(hidden, "expert_hidden")


def _weighted(middle_F: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Rows of any leading dimensions times their weights: what follows is linear."""
    if weights is None:
        return middle_F
    dtype = jnp.promote_types(middle_F.dtype, jnp.float32)
    return (weights[..., None] * middle_F.astype(dtype)).astype(middle_F.dtype)


def _gate(hidden_2F: jax.Array) -> jax.Array:
    gate, up = jnp.split(hidden_2F, 2, axis=-1)
    return jax.nn.silu(gate) * up
