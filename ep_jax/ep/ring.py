"""Ring: tokens are all-gathered over ep, each shard runs its own experts on them, results are reduce-scattered.

Letters: S ep shards, E experts, e local experts, T tokens per shard, K choices, N rows of a receiver, H routed width,
B = S*T tokens of the ep group.

Acceptance is agreed as for `ragged`; no exchange depends on the routing. A token's results are summed over its choices
on each shard, in k order, and over shards in the float32 reduce-scatter. Cheap to reason about, and dear in bytes: each
token travels to every shard.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ep_jax_kernels.index import quotient
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_jax.ep.agreed import Receivers, storage_starts
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.experts import RaggedRows
from ep_jax.ep.ranking import count_groups, invert, rank_in_group
from ep_jax.ep.returned import Returned
from ep_jax.ep.routes import Routes
from ep_jax.ep.rows import combine_rows, move_rows
from ep_jax.ep.settings import EPConfig
from ep_jax.mesh import gather_shards, reduce_scatter


class RingPlan(NamedTuple):
    place_BK: jax.Array  # row of every token's choices in this shard's N rows, -1 for other shards' and dropped ones
    assignment_N: jax.Array  # its inverse
    kept_TK: jax.Array  # bool, this shard's own assignments
    sent_TK: jax.Array  # bool: every valid assignment; drops are the receivers'
    sizes_e: jax.Array


@dataclasses.dataclass(frozen=True)
class Ring:
    """The transport for one layer shape; its methods run inside shard_map over the axis `ep`."""

    settings: EPConfig
    shape: LayerShape
    waves = 1

    @property
    def receivers(self) -> Receivers:
        return Receivers(self.settings, self.shape)

    def plan(self, routes: Routes) -> RingPlan:
        """Gathers all ids of the group; every shard agrees on what each keeps, and lays out its own rows."""
        shape, ids_TK = self.shape, routes.valid_ids_TK
        ids_STK = checkpoint_name(lax.all_gather(ids_TK, "ep"), "route_plan")
        ids_SA = ids_STK.reshape(shape.num_shards, -1)
        counts_SE = jax.vmap(lambda ids: count_groups(ids, shape.num_experts))(ids_SA)
        kept_SDe = self.receivers.keep(counts_SE, routes.group_valid)
        rank_SA = jax.vmap(lambda ids: rank_in_group(ids, shape.num_experts))(ids_SA)
        me = lax.axis_index("ep")
        destination_SA, local_SA = ids_SA // shape.local_experts, ids_SA % shape.local_experts
        source_SA = jnp.broadcast_to(jnp.arange(shape.num_shards, dtype=jnp.int32)[:, None], ids_SA.shape)
        kept_SA = (ids_SA >= 0) & (rank_SA < kept_SDe[source_SA, destination_SA, local_SA])
        start_DeS = storage_starts(kept_SDe)
        row_SA = start_DeS[destination_SA, local_SA, source_SA] + rank_SA
        place_BK = jnp.where(kept_SA & (destination_SA == me), row_SA, -1).reshape(-1, shape.experts_per_token)
        plan = RingPlan(
            place_BK=place_BK,
            assignment_N=invert(place_BK.reshape(-1), self.receivers.rows(0)),
            kept_TK=kept_SA[me].reshape(ids_TK.shape),
            sent_TK=ids_TK >= 0,
            sizes_e=kept_SDe[:, me].sum(axis=0, dtype=jnp.int32),
        )
        return checkpoint_name(plan, "route_plan")

    def dispatch(self, rows_TH: jax.Array, plan: RingPlan, wave: int, after: jax.Array | int) -> tuple:
        """All tokens of the group, and of these the rows of this shard's experts: (RaggedRows, None)."""
        del wave, after
        gathered_BH = checkpoint_name(gather_shards(rows_TH, 0, ("ep",), rows_TH.dtype), "dispatched_rows")
        token_N = quotient(plan.assignment_N, self.shape.experts_per_token)
        return RaggedRows(move_rows(gathered_BH, token_N, plan.place_BK), plan.sizes_e), None

    def weights_of(self, wave: int, w_gate_up: jax.Array, w_down: jax.Array) -> tuple[jax.Array, ...]:
        """The one wave visits all local experts."""
        del wave
        return w_gate_up, w_down

    def give_back(self, results_NH: jax.Array, arrival: None) -> Returned:
        """Nothing moves yet: a token's results are weighted and summed first."""
        return Returned(results_NH, None)

    def accepted(self, returned: Sequence[Returned], plan: RingPlan) -> jax.Array:
        """bool [T,K]: the assignments that were kept."""
        return plan.kept_TK

    def combine(
        self, returned: Sequence[Returned], weights_TK: jax.Array, accepted_TK: jax.Array, plan: RingPlan
    ) -> jax.Array:
        """Each shard's part of every token's sum, then the reduce-scatter over shards in at least float32."""
        (results,) = returned
        weights_BK = gather_shards(weights_TK, 0, ("ep",), weights_TK.dtype)
        wide = jnp.promote_types(results.rows_QH.dtype, jnp.float32)
        part_BH = combine_rows(results.rows_QH, weights_BK, plan.place_BK, plan.assignment_N, wide)
        total_TH = reduce_scatter(part_BH, "ep", 0)
        return checkpoint_name(total_TH.astype(results.rows_QH.dtype), "returned_rows")
