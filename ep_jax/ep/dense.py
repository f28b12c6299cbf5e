"""No expert parallelism: every shard gathers all experts' weights and keeps its rows. The FSDP alternative.

Letters: E experts, T tokens per shard, K choices, A = T*K assignments, Q rows: A, or a few more for whole groups of 8,
H routed width. Nothing is ever dropped.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ep_jax_kernels.index import quotient
from jax.ad_checkpoint import checkpoint_name

from ep_jax.ep.capacity import LayerShape, whole_rows
from ep_jax.ep.experts import RaggedRows
from ep_jax.ep.ranking import count_groups, invert, rank_in_group
from ep_jax.ep.returned import Returned, ReturnsRows
from ep_jax.ep.routes import Routes, final_weights
from ep_jax.ep.rows import move_numbers, move_rows, sum_moved_rows
from ep_jax.ep.settings import EPConfig
from ep_jax.mesh import gather_shards


class DensePlan(NamedTuple):
    place_TK: jax.Array  # row of each assignment in expert order, -1 when there is none
    assignment_Q: jax.Array  # its inverse
    sent_TK: jax.Array  # bool
    sizes_E: jax.Array  # rows of each expert
    weights_Q: jax.Array  # float32, by which the experts multiply the results of their rows


def expert_order(ids_TK: jax.Array, weights_TK: jax.Array, num_experts: int) -> DensePlan:
    """Sorts one shard's assignments by expert, those with id -1 left out."""
    ids_A = ids_TK.reshape(-1)
    sizes_E = count_groups(ids_A, num_experts)
    start_E = jnp.cumsum(sizes_E) - sizes_E
    place_A = jnp.where(ids_A < 0, -1, start_E[ids_A] + rank_in_group(ids_A, num_experts))
    order = place_A.reshape(ids_TK.shape), invert(place_A, whole_rows(ids_A.size)), ids_TK >= 0, sizes_E
    place_TK, assignment_Q, sent_TK, sizes_E = checkpoint_name(order, "route_plan")
    weights_Q = move_numbers(weights_TK.reshape(-1), assignment_Q, place_TK.reshape(-1, 1))
    return DensePlan(place_TK, assignment_Q, sent_TK, sizes_E, checkpoint_name(weights_Q, "route_plan"))


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
        ids_TK = routes.valid_ids_TK
        # All survive; what rescaling changes is a token whose weights sum to zero.
        weights_TK = final_weights(routes, ids_TK >= 0, rescale=self.settings.rescale)
        return expert_order(ids_TK, weights_TK, self.shape.num_experts)

    def dispatch(
        self, rows_TH: jax.Array, plan: DensePlan, wave: int, after: jax.Array | int
    ) -> tuple[RaggedRows, DensePlan]:
        """(RaggedRows of all experts, the plan)."""
        del wave, after
        rows_QH = checkpoint_name(move_rows(rows_TH, self._token_Q(plan), plan.place_TK), "expert_input")
        return RaggedRows(rows_QH, plan.sizes_E, plan.weights_Q), plan

    def give_back(self, results_QH: jax.Array, plan: DensePlan) -> Returned:
        """The rows never left."""
        return Returned(results_QH, None)

    def combine(
        self, returned: Sequence[Returned], weights_TK: jax.Array, accepted_TK: jax.Array, plan: DensePlan
    ) -> jax.Array:
        """[T,H]: the sum of each token's rows; the experts have multiplied them by their weights."""
        del weights_TK, accepted_TK
        # Gradients need the sum (of the layer above), not what it was summed of.
        return checkpoint_name(sum_moved_rows(returned[0].rows_QH, plan.place_TK, self._token_Q(plan)), "expert_output")

    def _token_Q(self, plan: DensePlan) -> jax.Array:
        """The token of each row, -1 for none."""
        return quotient(plan.assignment_Q, self.shape.experts_per_token)
