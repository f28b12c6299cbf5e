"""Fixed cells: every (source, expert) pair has its own slots, so rows arrive grouped by expert without any ids.

Letters: S ep shards, e local experts, T tokens per shard, K choices, W waves, C slots of a cell, H routed width,
Q = W*S*e*C slots of a source.

An assignment of rank r within its cell takes slot r // W of wave r % W and is sent when that is below the logical cell.
One all-to-all per wave each way. Everything that arrives is accepted; all drops are the sender's. Against `pooled_wave`
it needs no ids and no sorting at the receiver, and much more slack for the same drops.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ep_jax_kernels.index import quotient
from jax.ad_checkpoint import checkpoint_name

from ep_jax.ep.capacity import Capacity, LayerShape, cell
from ep_jax.ep.experts import CapacityRows
from ep_jax.ep.pooled_wave import exchange
from ep_jax.ep.ranking import invert, rank_assignments
from ep_jax.ep.returned import Returned, ReturnsRows
from ep_jax.ep.routes import Routes
from ep_jax.ep.rows import move_rows
from ep_jax.ep.settings import EPConfig


class CellPlan(NamedTuple):
    place_TK: jax.Array  # slot in [W, S, e, C], -1 when not sent
    assignment_Q: jax.Array  # t*K + k in each slot, -1 when empty

    @property
    def sent_TK(self) -> jax.Array:
        return self.place_TK >= 0


def plan_cells(routes: Routes, shape: LayerShape, capacity: Capacity, order: str, waves: int) -> CellPlan:
    """The slots of one source shard; no collectives."""
    slots, ids_TK = capacity.static_rows(shape.tokens), routes.valid_ids_TK
    rank_TK = rank_assignments(ids_TK, shape.num_experts, order, routes)
    wave_TK, slot_TK = rank_TK % waves, rank_TK // waves
    sent_TK = (ids_TK >= 0) & (slot_TK < capacity.logical_rows(routes.shard_valid))
    # Experts are numbered shard by shard, so the expert's id is its (destination, local expert).
    place_TK = jnp.where(sent_TK, (wave_TK * shape.num_experts + ids_TK) * slots + slot_TK, -1)
    return CellPlan(place_TK, invert(place_TK.reshape(-1), waves * shape.num_experts * slots))


@dataclasses.dataclass(frozen=True)
class FixedCell(ReturnsRows):
    """The transport for one layer shape; its methods run inside shard_map over the axis `ep`."""

    settings: EPConfig
    shape: LayerShape

    @property
    def waves(self) -> int:
        return self.settings.waves

    @property
    def cell(self) -> Capacity:
        return cell(self.settings.sender_factor, self.shape, self.waves)

    @property
    def cell_rows(self) -> int:
        """Static C."""
        return self.cell.static_rows(self.shape.tokens)

    def plan(self, routes: Routes) -> CellPlan:
        """The source's integers for all waves."""
        plan = plan_cells(routes, self.shape, self.cell, self.settings.order, self.waves)
        return checkpoint_name(plan, "route_plan")

    def dispatch(self, rows_TH: jax.Array, plan: CellPlan, wave: int, after: jax.Array | int) -> tuple:
        """Sends wave `wave`: (CapacityRows, nothing that give_back would need)."""
        size = self.shape.num_experts * self.cell_rows
        assignment = plan.assignment_Q[wave * size : (wave + 1) * size]
        token = quotient(assignment, self.shape.experts_per_token) + after
        here_TK = (plan.place_TK >= 0) & (plan.place_TK // size == wave)
        rows = move_rows(rows_TH, token, jnp.where(here_TK, plan.place_TK % size, -1))
        received = exchange(self._by_shard(rows))  # [source, e, C, H]
        received = checkpoint_name(received, "dispatched_rows")
        return CapacityRows(received.swapaxes(0, 1).reshape(self.shape.local_experts, -1, rows.shape[1])), None

    def weights_of(self, wave: int, w_gate_up: jax.Array, w_down: jax.Array) -> tuple[jax.Array, ...]:
        """Every wave visits all local experts."""
        del wave
        return w_gate_up, w_down

    def give_back(self, results_eRH: jax.Array, arrival: None) -> Returned:
        """Returns results to their sources, in sender slots."""
        local, shards = self.shape.local_experts, self.shape.num_shards
        by_source = results_eRH.reshape(local, shards, self.cell_rows, -1).swapaxes(0, 1)
        returned = checkpoint_name(exchange(by_source), "returned_rows")
        return Returned(returned.reshape(-1, results_eRH.shape[-1]), None)

    def _by_shard(self, rows_XH: jax.Array) -> jax.Array:
        return rows_XH.reshape(self.shape.num_shards, self.shape.local_experts, self.cell_rows, -1)
