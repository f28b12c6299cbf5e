"""No expert parallelism: every shard gathers all experts' weights and keeps its rows. The FSDP alternative.

Letters: E experts, T tokens per shard, K choices, A = T*K assignments, H routed width. Nothing is ever dropped.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.experts import RaggedRows
from ep_jax.ep.ranking import count_groups, invert, rank_in_group
from ep_jax.ep.returned import Returned, ReturnsRows
from ep_jax.ep.routes import Routes
from ep_jax.ep.rows import move_rows
from ep_jax.ep.settings import EPConfig
from ep_jax.mesh import gather_shards


class DensePlan(NamedTuple):
    place_TK: jax.Array  # row of each assignment in expert order, -1 when there is none
    assignment_Q: jax.Array  # its inverse
    sent_TK: jax.Array  # bool
    sizes_E: jax.Array  # rows of each expert


def expert_order(ids_TK: jax.Array, num_experts: int) -> DensePlan:
    """Sorts one shard's assignments by expert, those with id -1 left out."""
    ids_A = ids_TK.reshape(-1)
    sizes_E = count_groups(ids_A, num_experts)
    start_E = jnp.cumsum(sizes_E) - sizes_E
    place_A = jnp.where(ids_A < 0, -1, start_E[ids_A] + rank_in_group(ids_A, num_experts))
    return DensePlan(place_A.reshape(ids_TK.shape), invert(place_A, ids_A.size), ids_TK >= 0, sizes_E)


@dataclasses.dataclass(frozen=True)
class Dense(ReturnsRows):
    """The transport for one layer shape; its methods run inside shard_map over the axis `ep`."""

    settings: EPConfig
    shape: LayerShape
    waves = 1

    def weights_of(self, wave: int, w_gate_up: jax.Array, w_down: jax.Array) -> tuple[jax.Array, ...]:
        """All E experts' weights from the shards' e; gradients are reduced in float32."""
        del wave
        return tuple(gather_shards(w, 0, ("ep",), w.dtype) for w in (w_gate_up, w_down))

    def plan(self, routes: Routes) -> DensePlan:
        """Sorts the shard's own assignments by expert."""
        return checkpoint_name(expert_order(routes.valid_ids_TK, self.shape.num_experts), "route_plan")

    def dispatch(
        self, rows_TH: jax.Array, plan: DensePlan, wave: int, after: jax.Array | int
    ) -> tuple[RaggedRows, DensePlan]:
        """(RaggedRows of all experts, the plan)."""
        del wave, after
        token_A = jnp.where(plan.assignment_Q < 0, -1, plan.assignment_Q // self.shape.experts_per_token)
        rows_AH = checkpoint_name(move_rows(rows_TH, token_A, plan.place_TK), "expert_input")
        return RaggedRows(rows_AH, plan.sizes_E), plan

    def give_back(self, results_AH: jax.Array, plan: DensePlan) -> Returned:
        """The rows never left."""
        return Returned(checkpoint_name(results_AH, "expert_output"), None)
