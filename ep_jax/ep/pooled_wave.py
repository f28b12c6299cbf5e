"""The fixed-pooled-wave all-to-all: a sender pool per destination, expert rows per receiver, token waves.

Letters: S ep shards, E experts, e local experts, T tokens per shard, K choices, A = T*K, W waves, P pool slots,
R rows per expert, C rows of all local experts of a wave in whole groups of 8, H routed width, Q = W*S*P slots of a
source.

A source ranks its assignments per destination; assignment of rank r takes slot r // W of wave r % W and is sent when
that slot is below the logical pool. One all-to-all per wave carries rows and local expert ids. The receiver takes slot
p of every source before slot p+1 of any and keeps an expert's first R rows. One all-to-all back carries results and,
in the same lanes, which slots were accepted. Buffers have fixed sizes; no count is exchanged before rows move.

With `ep.payload = "float8_e4m3"` rows go out in e4m3 with a scale each (float8.py); ids, results and all gradients are
as ever, and so is what is kept.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ep_jax_kernels.index import quotient
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_jax.ep import float8
from ep_jax.ep.agreement import fill
from ep_jax.ep.capacity import Capacity, LayerShape, expert_rows, sender_pool, whole_rows
from ep_jax.ep.experts import CapacityRows, ExpertRows, RaggedRows
from ep_jax.ep.payload import Float8Layout, Layout
from ep_jax.ep.ranking import count_groups, invert, rank_assignments, rank_in_group
from ep_jax.ep.returned import Returned, ReturnsRows
from ep_jax.ep.routes import Routes
from ep_jax.ep.rows import move_rows
from ep_jax.ep.settings import EPConfig


class SenderPlan(NamedTuple):
    """Where a source puts its assignments; integers only, made once per layer."""

    place_TK: jax.Array  # slot in [W, S, P], -1 when not sent
    assignment_Q: jax.Array  # t*K + k in each slot, -1 when empty
    local_id_Q: jax.Array  # expert id within its shard, -1 when empty
    expert_limit: jax.Array  # int32 scalar, logical R

    @property
    def sent_TK(self) -> jax.Array:
        return self.place_TK >= 0


class Arrival(NamedTuple):
    """A receiver's part of one wave's plan; exists once the payload is there."""

    row_SP: jax.Array  # row of each received slot in the C rows, -1 when dropped or empty
    slot_C: jax.Array  # its inverse: received slot of each row, -1 when empty
    sizes_e: jax.Array  # rows of each expert: of its R rows the first (receive = expert), or one after the other (pool)


def plan_sender(
    routes: Routes, shape: LayerShape, pool: Capacity, order: str, waves: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(place_TK, assignment_Q, local_id_Q) of one source shard; no collectives."""
    slots = pool.static_rows(shape.tokens)
    ids_TK = routes.valid_ids_TK
    destination_TK = quotient(ids_TK, shape.local_experts)
    rank_TK = rank_assignments(destination_TK, shape.num_shards, order, routes)
    place_TK = deal(rank_TK, destination_TK, routes, shape, pool, waves)
    return place_TK, *held_by(place_TK, waves * shape.num_shards * slots, routes, shape)


def deal(
    rank_TK: jax.Array, destination_TK: jax.Array, routes: Routes, shape: LayerShape, pool: Capacity, waves: int
) -> jax.Array:
    """int32 [T,K]: the slot in [W, S, P] of each rank at its destination, -1 past the pool or without one (-1)."""
    wave_TK, slot_TK = rank_TK % waves, rank_TK // waves
    sent_TK = (destination_TK >= 0) & (slot_TK < pool.logical_rows(routes.shard_valid))
    first_TK = (wave_TK * shape.num_shards + destination_TK) * pool.static_rows(shape.tokens)
    return jnp.where(sent_TK, first_TK + slot_TK, -1)


def held_by(place_TK: jax.Array, num_places: int, routes: Routes, shape: LayerShape) -> tuple[jax.Array, jax.Array]:
    """(assignment t*K + k, its expert's id within its shard) of each place, int32, -1 where none has it."""
    assignment_Q = invert(place_TK.reshape(-1), num_places)
    local_A = routes.valid_ids_TK.reshape(-1) % shape.local_experts
    return assignment_Q, jnp.where(assignment_Q < 0, -1, local_A[assignment_Q])


def plan_receiver(local_id_SP: jax.Array, limit: jax.Array, rows: int, local_experts: int) -> Arrival:
    """Accepts received slots: round-robin over sources, the first `limit` of each expert; no collectives.

    local_id_SP is -1 for empty slots. `rows` is what an expert's buffer has, at least the limit.
    """
    sources, slots = local_id_SP.shape
    turn_PS = local_id_SP.T.reshape(-1)  # slot p of every source before slot p+1 of any
    rank_SP = rank_in_group(turn_PS, local_experts).reshape(slots, sources).T
    accepted_SP = (local_id_SP >= 0) & (rank_SP < limit)
    row_SP = jnp.where(accepted_SP, local_id_SP * rows + rank_SP, -1)
    slot_C = invert(row_SP.reshape(-1), local_experts * rows)
    return Arrival(row_SP, slot_C, jnp.sum(slot_C.reshape(local_experts, rows) >= 0, axis=1, dtype=jnp.int32))


def plan_receiver_pool(local_id_SP: jax.Array, limit: jax.Array, rows: int, local_experts: int) -> Arrival:
    """Accepts received slots from one pool of `limit` rows, filled over the experts; each keeps its first ones.

    The order within an expert is that of `plan_receiver`; rows of an expert follow those of the one before.
    """
    sources, slots = local_id_SP.shape
    turn_PS = local_id_SP.T.reshape(-1)
    rank_SP = rank_in_group(turn_PS, local_experts).reshape(slots, sources).T
    quota_e = fill(count_groups(turn_PS, local_experts), limit)
    start_e = jnp.cumsum(quota_e) - quota_e
    accepted_SP = (local_id_SP >= 0) & (rank_SP < quota_e[local_id_SP])
    row_SP = jnp.where(accepted_SP, start_e[local_id_SP] + rank_SP, -1)
    return Arrival(row_SP, invert(row_SP.reshape(-1), rows), quota_e)


@dataclasses.dataclass(frozen=True)
class Pooled(ReturnsRows):
    """What holds whatever a slot holds (`ep.slots`), for one layer shape."""

    settings: EPConfig
    shape: LayerShape

    @property
    def waves(self) -> int:
        return self.settings.waves

    @property
    def pool(self) -> Capacity:
        """P as a function of a shard's valid tokens."""
        raise NotImplementedError

    @property
    def pool_rows(self) -> int:
        """Static P."""
        return self.pool.static_rows(self.shape.tokens)

    @property
    def per_slot(self) -> int:
        """J: assignments that a slot may hold."""
        return 1

    @property
    def receiver(self) -> Capacity:
        return expert_rows(self.settings.receiver_factor, self.shape, self.waves, self.pool_rows)

    @property
    def expert_rows(self) -> int:
        """Static R."""
        return self.receiver.static_rows(self.shape.tokens * self.shape.num_shards)

    @property
    def rows_apart(self) -> int:
        """From one local expert's rows to the next one's where each has its own: R, or a few more for whole groups."""
        return whole_rows(self.expert_rows, self.shape.local_experts)

    @property
    def held_rows(self) -> int:
        """Static C: rows of all local experts in a wave."""
        if self.settings.receive == "expert":
            return self.shape.local_experts * self.rows_apart
        slots = self.shape.num_shards * self.pool_rows
        return whole_rows(min(self.shape.local_experts * self.expert_rows, slots * self.per_slot))

    @property
    def balanced_rows(self) -> float:
        """Of the R rows, those that balanced routing of all tokens fills in a wave, after the senders' drops."""
        routed = self.shape.num_shards * self.shape.assignments / (self.shape.num_experts * self.waves)
        return min(1.0, self.settings.sender_factor) * routed

    def entries(self, routes: Routes, pool: Capacity) -> tuple[jax.Array, jax.Array]:
        """What `simulate` asks of a source: (an assignment's place in [W, S, P, J], -1 unsent; the local id there)."""
        raise NotImplementedError

    def decide(self, local_id_SPJ: jax.Array, expert_limit: jax.Array) -> jax.Array:
        """What `simulate` asks of a receiver: bool [S,P,J], which entries of one wave's slots it accepts."""
        raise NotImplementedError

    def accept(self, local_id_SP: jax.Array, expert_limit: jax.Array) -> Arrival:
        """The receiver's part of one wave's plan, from the ids that arrived (-1 in empty slots)."""
        local = self.shape.local_experts
        if self.settings.receive == "expert":
            return plan_receiver(local_id_SP, expert_limit, self.rows_apart, local)
        limit = jnp.minimum(local * expert_limit, self.held_rows)
        return plan_receiver_pool(local_id_SP, limit, self.held_rows, local)

    def weights_of(self, wave: int, w_gate_up: jax.Array, w_down: jax.Array) -> tuple[jax.Array, ...]:
        """Every wave visits all local experts."""
        del wave
        return w_gate_up, w_down

    def _for_experts(self, held_CH: jax.Array, sizes_e: jax.Array, weights_C: jax.Array | None = None) -> ExpertRows:
        """The C rows as the experts take them; weights as of ExpertRows."""
        if self.settings.receive == "pool":
            return RaggedRows(held_CH, sizes_e, weights_C)
        by_expert = held_CH.reshape(self.shape.local_experts, self.rows_apart, -1)
        weights_eR = None if weights_C is None else weights_C.reshape(by_expert.shape[:2])
        return CapacityRows(by_expert, sizes_e, self.balanced_rows, weights_eR)

    def _to_peers(self, rows_QH: jax.Array) -> jax.Array:
        """Rows in slots to the peers that the slots are of."""
        by_peer = rows_QH.reshape(self.shape.num_shards, self.pool_rows, -1)
        return exchange(by_peer).reshape(rows_QH.shape)


@dataclasses.dataclass(frozen=True)
class PooledWave(Pooled):
    """The transport for one layer shape, an assignment in each slot; its methods run inside shard_map over `ep`."""

    @property
    def pool(self) -> Capacity:
        return sender_pool(self.settings.sender_factor, self.shape, self.waves)

    def entries(self, routes: Routes, pool: Capacity) -> tuple[jax.Array, jax.Array]:
        """As of Pooled."""
        place, _, local_id = plan_sender(routes, self.shape, pool, self.settings.order, self.waves)
        return place, local_id

    def decide(self, local_id_SPJ: jax.Array, expert_limit: jax.Array) -> jax.Array:
        """As of Pooled."""
        return self.accept(local_id_SPJ[..., 0], expert_limit).row_SP[..., None] >= 0

    def plan(self, routes: Routes) -> SenderPlan:
        """The source's integers for all waves."""
        place, assignment, local_id = plan_sender(routes, self.shape, self.pool, self.settings.order, self.waves)
        limit = self.receiver.logical_rows(routes.group_valid)
        return checkpoint_name(SenderPlan(place, assignment, local_id, limit), "route_plan")

    def dispatch(
        self, rows_TH: jax.Array, plan: SenderPlan, wave: int, after: jax.Array | int
    ) -> tuple[ExpertRows, Arrival]:
        """Sends wave `wave` and sorts what arrives by expert: (ExpertRows, Arrival).

        `after` is an int32 zero that makes this wave wait for what it was computed from.
        """
        shards, slots = self.shape.num_shards, self.pool_rows
        size = shards * slots
        mine = slice(wave * size, (wave + 1) * size)
        assignment = plan.assignment_Q[mine]
        token = quotient(assignment, self.shape.experts_per_token) + after
        places_TK = jnp.where(plan.place_TK // size == wave, plan.place_TK % size, -1)
        places_TK = jnp.where(plan.place_TK < 0, -1, places_TK)
        numbers = plan.local_id_Q[mine].reshape(shards, slots) + 1
        send = self._send_float8 if self.settings.payload == "float8_e4m3" else self._send
        held, arrival = send(rows_TH, token, places_TK, numbers, plan.expert_limit)
        return self._for_experts(held, arrival.sizes_e), arrival

    def _send(
        self,
        rows_TH: jax.Array,
        token_Q: jax.Array,
        places_TK: jax.Array,
        numbers_SP: jax.Array,
        expert_limit: jax.Array,
    ) -> tuple[jax.Array, Arrival]:
        """Tokens to their slots of a wave, the exchange, and what was accepted to the experts' C rows [C,H]."""
        layout = Layout(self.pool_rows, self.shape.local_experts, rows_TH.shape[1])
        rows_XH = move_rows(rows_TH, layout.by_row(token_Q), layout.rows_of(places_TK))
        rows_XH, arrival = self._exchange(layout, numbers_SP, rows_XH, expert_limit)
        return move_rows(rows_XH, layout.rows_of(arrival.slot_C), layout.by_row(arrival.row_SP)[:, None]), arrival

    def _send_float8(
        self,
        rows_TH: jax.Array,
        token_Q: jax.Array,
        places_TK: jax.Array,
        numbers_SP: jax.Array,
        expert_limit: jax.Array,
    ) -> tuple[jax.Array, Arrival]:
        """As `_send`, by bytes. Gradients travel without a header: slots are rows."""
        layout = Float8Layout(self.pool_rows, rows_TH.shape[1])
        rows = float8.quantize(rows_TH, layout.by_row(token_Q))
        rows, arrival = self._exchange(layout, numbers_SP, rows, expert_limit)
        row_C, held_Q = layout.rows_of(arrival.slot_C), arrival.row_SP.reshape(-1)
        return float8.place(rows_TH, rows, row_C, held_Q, places_TK, self._to_peers), arrival

    def _exchange(
        self, layout: Layout | Float8Layout, numbers_SP: jax.Array, rows: Any, expert_limit: jax.Array
    ) -> tuple[Any, Arrival]:
        """The payload's rows that arrived, as `layout` packs them, and what of them is accepted."""
        received = checkpoint_name(exchange(layout.pack(numbers_SP, rows)), "dispatched_rows")
        numbers_SP, rows = layout.unpack(received)
        return rows, checkpoint_name(self.accept(numbers_SP - 1, expert_limit), "route_plan")

    def give_back(self, results: jax.Array, arrival: Arrival) -> Returned:
        """Returns results to their sources, in sender slots, with a flag for each that was accepted.

        The rows are those of the payload, header rows included; `combine` knows.
        """
        results_CH = results.reshape(-1, results.shape[-1])
        layout = self._returned_layout(results_CH.shape[1])
        rows_XH = move_rows(results_CH, layout.by_row(arrival.row_SP), layout.rows_of(arrival.slot_C)[:, None])
        accepted = (arrival.row_SP >= 0).astype(jnp.int32)
        returned = checkpoint_name(exchange(layout.pack(accepted, rows_XH)), "returned_rows")
        accepted, rows_XH = layout.unpack(returned)
        return Returned(rows_XH, accepted.reshape(-1) > 0)

    def combine(
        self, returned: Sequence[Returned], weights_TK: jax.Array, accepted_TK: jax.Array, plan: SenderPlan
    ) -> jax.Array:
        """[T,H]: the weighted sum of each token's accepted rows."""
        layout = self._returned_layout(returned[0].rows_QH.shape[1])
        places = plan._replace(place_TK=layout.rows_of(plan.place_TK), assignment_Q=layout.by_row(plan.assignment_Q))
        return super().combine(returned, weights_TK, accepted_TK, places)

    def _returned_layout(self, width: int) -> Layout:
        return Layout(self.pool_rows, 1, width)


def exchange(payload_SXH: jax.Array) -> jax.Array:
    """The protocol's one collective: block j of the payload goes to ep shard j. Its own transpose."""
    return lax.all_to_all(payload_SXH, "ep", split_axis=0, concat_axis=0)
