"""Row-wise: a route map (token, choice) -> (shard, row), rows written straight into the expert's buffer.

Letters: S ep shards, e local experts, T tokens per shard, K choices, W waves, N rows of a receiver's wave buffer,
H routed width, Q = W*S*N rows of all receivers.

Acceptance is agreed before rows move, as for `ragged`, so a source knows the exact row of every kept assignment and
rows arrive in place. This file is the emulation for any backend: an all-gather stands in for the one-sided writes and
reads, with the same map, the same rows and the same results. Its traffic is not the transport's.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ep_jax_kernels.index import quotient
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_jax.ep.agreed import Receivers, gather_counts, storage_starts
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.experts import RaggedRows
from ep_jax.ep.ranking import invert, rank_in_group
from ep_jax.ep.returned import Returned, ReturnsRows
from ep_jax.ep.routes import Routes
from ep_jax.ep.rows import move_rows
from ep_jax.ep.settings import EPConfig
from ep_jax.mesh import gather_shards

# Copying a row inside a GPU takes about a third of the link's time for it on H200, and all GPUs meet once more.
MOST_CROSSING = 0.8


def once_per_peer(shape: LayerShape, experts: int) -> bool:
    """Whether a token's row crosses once to a peer, to be copied there, and results are summed there before they cross.

    experts: those of a shard that one movement serves. On 2 H200 dispatch, combine and their gradients take 1.47
    instead of 2.33 ms at bench shape A, 1.00 instead of 2.32 at B and 2.53 instead of 6.17 at C, which have a crossing
    share of 0.48, 0.25 and 0.25 (`benchmarks/rowwise_fans_h200x2_20261130.json`).
    """
    return shape.num_shards > 1 and shape.crossing_share(experts) <= MOST_CROSSING


def crossing_shares(settings: EPConfig, shape: LayerShape) -> tuple[float, float]:
    """Rows that cross to peers over routed rows, of dispatch and of combine, as expected of uniform choices."""
    # A wave's dispatch knows nothing of the others; one combine sums the results of all waves.
    served = Receivers(settings, shape).group, shape.local_experts
    there, back = (shape.crossing_share(experts) if once_per_peer(shape, experts) else 1.0 for experts in served)
    return there, back


class RowwisePlan(NamedTuple):
    place_TK: jax.Array  # the route map: row in [W, S, N], -1 when dropped or invalid
    assignment_Q: jax.Array  # its inverse
    sent_TK: jax.Array  # bool: every valid assignment; drops are the receivers'
    sizes_We: tuple[jax.Array, ...]  # rows that arrive for this shard's experts, by wave


class Homes(NamedTuple):
    """Where assignments go, int32; of invalid ones the first two are unspecified."""

    destination_A: jax.Array
    wave_A: jax.Array
    row_A: jax.Array  # of the destination's buffer of that wave; -1 when dropped or invalid


def find_homes(
    ids_A: jax.Array, rank_A: jax.Array, source_A: jax.Array, kept_SDe: jax.Array, receivers: Receivers
) -> Homes:
    """The homes of any shards' assignments, from everybody's agreed rows; no collectives.

    ids_A is -1 at invalid tokens, rank_A counts the earlier assignments of the same source and expert; source_A may be
    one number. Any shape instead of [A].
    """
    destination_A, local_A = ids_A // receivers.shape.local_experts, ids_A % receivers.shape.local_experts
    starts = [storage_starts(kept_SDe[:, :, receivers.experts_of(wave)]) for wave in range(receivers.waves)]
    start_A = jnp.concatenate(starts, axis=1)[destination_A, local_A, source_A]
    kept_A = (ids_A >= 0) & (rank_A < kept_SDe[source_A, destination_A, local_A])
    return Homes(destination_A, local_A // receivers.group, jnp.where(kept_A, start_A + rank_A, -1))


def arriving(kept_SDe: jax.Array, me: jax.Array, receivers: Receivers) -> tuple[jax.Array, ...]:
    """int32 [e of the wave] by wave: rows that arrive for the experts of shard `me`."""
    arriving_e = kept_SDe[:, me].sum(axis=0, dtype=jnp.int32)
    return tuple(arriving_e[receivers.experts_of(wave)] for wave in range(receivers.waves))


def route_map(ids_TK: jax.Array, kept_SDe: jax.Array, me: jax.Array, receivers: Receivers) -> jax.Array:
    """int32 [T,K]: the row of each kept assignment of shard `me` in [W, S, N], -1 for the others; no collectives.

    ids_TK is -1 at invalid tokens.
    """
    ids_A = ids_TK.reshape(-1)
    rank_A = rank_in_group(ids_A, receivers.shape.num_experts)
    destination_A, wave_A, row_A = find_homes(ids_A, rank_A, me, kept_SDe, receivers)
    place_A = (wave_A * receivers.shape.num_shards + destination_A) * receivers.rows(0) + row_A
    return jnp.where(row_A < 0, -1, place_A).reshape(ids_TK.shape)


@dataclasses.dataclass(frozen=True)
class RowwiseBase(ReturnsRows):
    """One layer shape's waves and experts, here and on GPUs."""

    settings: EPConfig
    shape: LayerShape

    @property
    def receivers(self) -> Receivers:
        return Receivers(self.settings, self.shape)

    @property
    def waves(self) -> int:
        return self.receivers.waves

    def weights_of(self, wave: int, w_gate_up: jax.Array, w_down: jax.Array) -> tuple[jax.Array, ...]:
        """The weights of the wave's experts."""
        experts = self.receivers.experts_of(wave)
        return w_gate_up[experts], w_down[experts]


class Rowwise(RowwiseBase):
    """The transport for one layer shape; its methods run inside shard_map over the axis `ep`."""

    def plan(self, routes: Routes) -> RowwisePlan:
        """Agrees on the kept rows and maps each to its row."""
        kept_SDe = self.receivers.keep(gather_counts(routes, self.shape.num_experts), routes.group_valid)
        me, ids_TK = lax.axis_index("ep"), routes.valid_ids_TK
        place_TK = route_map(ids_TK, kept_SDe, me, self.receivers)
        total = self.waves * self.shape.num_shards * self.receivers.rows(0)
        sizes = arriving(kept_SDe, me, self.receivers)
        plan = RowwisePlan(place_TK, invert(place_TK.reshape(-1), total), ids_TK >= 0, sizes)
        return checkpoint_name(plan, "route_plan")

    def dispatch(self, rows_TH: jax.Array, plan: RowwisePlan, wave: int, after: jax.Array | int) -> tuple:
        """Every shard's rows of wave `wave` in this shard's buffer: (RaggedRows, None)."""
        rows, shards = self.receivers.rows(0), self.shape.num_shards
        first = (wave * shards + lax.axis_index("ep")) * rows  # of this shard's buffer in [W, S, N]
        map_AK = lax.all_gather(plan.place_TK, "ep").reshape(-1, plan.place_TK.shape[1])
        here_AK = jnp.where((map_AK >= first) & (map_AK < first + rows), map_AK - first, -1)
        assignment_N = invert(here_AK.reshape(-1), rows)
        token_N = quotient(assignment_N, here_AK.shape[1]) + after
        all_rows = gather_shards(rows_TH, 0, ("ep",), rows_TH.dtype)
        put = checkpoint_name(move_rows(all_rows, token_N, here_AK), "dispatched_rows")
        return RaggedRows(put, plan.sizes_We[wave]), None

    def give_back(self, results_NH: jax.Array, arrival: None) -> Returned:
        """Every shard's results of the wave, [S*N, H], for the combine to read from."""
        gathered = gather_shards(results_NH, 0, ("ep",), results_NH.dtype)
        return Returned(checkpoint_name(gathered, "returned_rows"), None)
