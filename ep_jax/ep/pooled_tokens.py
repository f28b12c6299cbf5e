"""The fixed-pooled-wave all-to-all with tokens in the sender's slots: a row crosses to a shard once (`ep.slots`).

Letters as in pooled_wave.py, J = min(K, e) experts that one token can choose on one shard, Q*J entries of slots (E
behind an underscore).

A source ranks, per destination, the tokens that chose any of its experts; a token ranks as the first of these
assignments would. A slot holds the token's row, and a small exchange before the rows says which local experts want it
and with which weights. The receiver decides assignment by assignment, as ever: slot p of every source before slot p+1
of any. Its experts weight their results where the rows are anyway, and those of a slot are summed, so that one row goes
back, with a bit for each accepted assignment. The sum is float32 and crosses in the rows' type: one more rounding for
each shard of a token.

Balanced routing fills as many slots as tokens are expected to choose a shard, fewer than assignments: 0.25 of them with
2 shards and 8 of 64 experts; with 8 of 384 experts 0.66 on 8 shards and 0.96 on 64. And a pool of all T tokens never
overflows, however popular a shard is, where one of assignments would have to hold T*J.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ep_jax_kernels.index import quotient
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_jax.ep.capacity import Capacity, LayerShape, token_pool
from ep_jax.ep.experts import ExpertRows
from ep_jax.ep.payload import Layout
from ep_jax.ep.pooled_wave import Pooled, PooledWave, deal, exchange, held_by
from ep_jax.ep.ranking import rank_assignments
from ep_jax.ep.returned import Returned
from ep_jax.ep.routes import Routes, survivors_scale
from ep_jax.ep.rows import combine_rows, move_numbers, move_rows, sum_moved_rows
from ep_jax.ep.settings import EPConfig
from ep_jax.fields import ConfigError

MOST_PER_SLOT = 31  # flags in an int32 that stays positive


class TokenArrival(NamedTuple):
    """A receiver's part of one wave's plan."""

    place_QJ: jax.Array  # of the S*P received slots' assignments: row of the C rows, -1 when dropped or empty
    entry_C: jax.Array  # its inverse: q*J + j of each row, -1 when empty
    sizes_e: jax.Array  # as of pooled_wave.Arrival
    weights_C: jax.Array  # float32 combine weights


class TokenSlots(NamedTuple):
    """Where a source puts its tokens, int32; entries are [W, S, P, J]."""

    place_TK: jax.Array  # slot in [W, S, P], shared by a token's assignments to one shard, -1 when not sent
    nth_TK: jax.Array  # which of its slot's J an assignment is
    entry_TK: jax.Array  # both in one, -1 when not sent
    assignment_E: jax.Array  # its inverse: t*K + k of each entry, -1 for none
    local_id_E: jax.Array  # id of its expert within its shard, -1 for none


class TokenPlan(NamedTuple):
    """Where a source puts its tokens, and what it accepts as a receiver; made once per layer."""

    place_TK: jax.Array  # slot in [W, S, P], shared by a token's assignments to one shard, -1 when not sent
    nth_TK: jax.Array  # which of its slot's J an assignment is
    assignment_QJ: jax.Array  # t*K + k, -1 for none
    arrivals: tuple[TokenArrival, ...]  # by wave
    weights_TK: jax.Array  # for rescaling
    valid_T: jax.Array

    @property
    def sent_TK(self) -> jax.Array:
        return self.place_TK >= 0


def plan_tokens(
    routes: Routes, shape: LayerShape, pool: Capacity, order: str, waves: int
) -> tuple[jax.Array, jax.Array]:
    """(place_TK, nth_TK) of one source shard; no collectives."""
    ids_TK, weights_TK = routes.valid_ids_TK, lax.stop_gradient(routes.weights_TK)
    destination_TK = quotient(ids_TK, shape.local_experts)
    k = jnp.arange(shape.experts_per_token, dtype=jnp.int32)
    earlier_TKK = jnp.broadcast_to(k[None, None, :] < k[None, :, None], (*ids_TK.shape, k.size))
    if order == "weight":
        one_TK1, other_T1K = weights_TK[:, :, None], weights_TK[:, None, :]
        earlier_TKK = (other_T1K > one_TK1) | ((other_T1K == one_TK1) & earlier_TKK)
    together_TKK = destination_TK[:, :, None] == destination_TK[:, None, :]
    nth_TK = jnp.sum(together_TKK & earlier_TKK, axis=2, dtype=jnp.int32)
    first_TK = (nth_TK == 0) & (ids_TK >= 0)
    rank_TK = rank_assignments(jnp.where(first_TK, destination_TK, -1), shape.num_shards, order, routes)
    rank_TK = jnp.sum(jnp.where(together_TKK & first_TK[:, None, :], rank_TK[:, None, :], 0), axis=2, dtype=jnp.int32)
    return deal(rank_TK, destination_TK, routes, shape, pool, waves), nth_TK


@dataclasses.dataclass(frozen=True)
class PooledTokens(Pooled):
    """The transport for one layer shape, with a token in each slot; its methods run inside shard_map over `ep`.

    Raises ConfigError where a token can choose more experts of a shard than a slot has flags.
    """

    def __post_init__(self):
        if self.per_slot > MOST_PER_SLOT:
            raise ConfigError(
                f"ep.slots = 'token': a token may choose {self.per_slot} experts of one shard, min(router."
                f"experts_per_token, experts of a shard); allowed is up to {MOST_PER_SLOT}, or ep.slots assignment"
            )

    @property
    def pool(self) -> Capacity:
        return token_pool(self.settings.sender_factor, self.shape, self.waves)

    @property
    def per_slot(self) -> int:
        """J."""
        return self.shape.most_per_destination

    def entries(self, routes: Routes, pool: Capacity) -> tuple[jax.Array, jax.Array]:
        """As of Pooled."""
        slots = self._slots(routes, pool)
        return slots.entry_TK, slots.local_id_E

    def _slots(self, routes: Routes, pool: Capacity) -> TokenSlots:
        place_TK, nth_TK = plan_tokens(routes, self.shape, pool, self.settings.order, self.waves)
        entry_TK = jnp.where(place_TK < 0, -1, place_TK * self.per_slot + nth_TK)
        slots = self.waves * self.shape.num_shards * pool.static_rows(self.shape.tokens)
        return TokenSlots(place_TK, nth_TK, entry_TK, *held_by(entry_TK, slots * self.per_slot, routes, self.shape))

    def _accept_entries(
        self, local_id_SPJ: jax.Array, expert_limit: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(place_QJ, entry_C, sizes_e) of a TokenArrival: the receiver's decision on one wave."""
        shards, slots, choices = local_id_SPJ.shape
        # Sources side by side, each with its slot's assignments: so an expert takes slot p of all before slot p+1.
        arrival = self.accept(local_id_SPJ.swapaxes(1, 2).reshape(-1, slots), expert_limit)
        place_QJ = arrival.row_SP.reshape(shards, choices, slots).swapaxes(1, 2).reshape(-1, choices)
        side_C, slot_C = arrival.slot_C // slots, arrival.slot_C % slots
        source_C, nth_C = side_C // choices, side_C % choices
        entry_C = jnp.where(arrival.slot_C < 0, -1, (source_C * slots + slot_C) * choices + nth_C)
        return place_QJ, entry_C, arrival.sizes_e

    def decide(self, local_id_SPJ: jax.Array, expert_limit: jax.Array) -> jax.Array:
        """As of Pooled."""
        return (self._accept_entries(local_id_SPJ, expert_limit)[0] >= 0).reshape(local_id_SPJ.shape)

    def plan(self, routes: Routes) -> TokenPlan:
        """The source's integers for all waves, and from one small exchange the receiver's."""
        choices = self.per_slot
        slots = checkpoint_name(self._slots(routes, self.pool), "route_plan")
        place_TK, nth_TK, entry_TK, assignment_E, local_id_E = slots
        weight_E = move_numbers(routes.weights_TK.reshape(-1), assignment_E, entry_TK.reshape(-1, 1))
        # Ids are exact in float32, and so the weights' gradients come back the same way.
        told_E2 = jnp.stack([local_id_E.astype(weight_E.dtype), weight_E], axis=-1)
        by_wave = (self.waves, self.shape.num_shards, self.pool_rows, choices, 2)
        told_SWPJ2 = exchange(told_E2.reshape(by_wave).swapaxes(0, 1))
        ids_SWPJ = lax.stop_gradient(told_SWPJ2[..., 0]).astype(jnp.int32)
        limit = self.receiver.logical_rows(routes.group_valid)

        def arrival(wave: int) -> TokenArrival:
            decided = self._accept_entries(ids_SWPJ[:, wave], limit)
            place_QJ, entry_C, sizes_e = checkpoint_name(decided, "route_plan")
            weights_E = told_SWPJ2[:, wave, ..., 1].reshape(-1)
            weights_C = move_numbers(weights_E, entry_C, place_QJ.reshape(-1, 1))
            return TokenArrival(place_QJ, entry_C, sizes_e, checkpoint_name(weights_C, "route_plan"))

        arrivals = tuple(arrival(wave) for wave in range(self.waves))
        assignment_QJ = assignment_E.reshape(-1, choices)
        return TokenPlan(place_TK, nth_TK, assignment_QJ, arrivals, routes.weights_TK, routes.valid_T)

    def dispatch(
        self, rows_TH: jax.Array, plan: TokenPlan, wave: int, after: jax.Array | int
    ) -> tuple[ExpertRows, TokenArrival]:
        """Sends wave `wave` and sorts what is accepted of it by expert: (ExpertRows, TokenArrival)."""
        size, choices = self.shape.num_shards * self.pool_rows, self.per_slot
        first_Q = plan.assignment_QJ[wave * size : (wave + 1) * size, 0]
        token_Q = quotient(first_Q, self.shape.experts_per_token) + after
        here_TK = (plan.nth_TK == 0) & (plan.place_TK >= 0) & (plan.place_TK // size == wave)
        rows_QH = move_rows(rows_TH, token_Q, jnp.where(here_TK, plan.place_TK % size, -1))
        received_QH = checkpoint_name(self._to_peers(rows_QH), "dispatched_rows")
        arrival = plan.arrivals[wave]
        slot_C = quotient(arrival.entry_C, choices)
        held_CH = move_rows(received_QH, slot_C, arrival.place_QJ)
        return self._for_experts(held_CH, arrival.sizes_e, arrival.weights_C), arrival

    def give_back(self, results: jax.Array, arrival: TokenArrival) -> Returned:
        """Returns each slot's weighted sum to its source, with a bit for each of its assignments that was accepted."""
        results_CH = results.reshape(-1, results.shape[-1])
        layout, choices = self._layout(results_CH.shape[1]), self.per_slot
        place_XJ = jnp.stack([layout.by_row(arrival.place_QJ[:, j]) for j in range(choices)], axis=1)
        slot_C = layout.rows_of(quotient(arrival.entry_C, choices))
        rows_XH = sum_moved_rows(results_CH, place_XJ, slot_C)
        bits_J = jnp.left_shift(1, jnp.arange(choices, dtype=jnp.int32))
        accepted_SP = jnp.sum(jnp.where(arrival.place_QJ >= 0, bits_J[None], 0), axis=1, dtype=jnp.int32)
        payload = layout.pack(accepted_SP.reshape(self.shape.num_shards, -1), rows_XH)
        accepted_SP, rows_XH = layout.unpack(checkpoint_name(exchange(payload), "returned_rows"))
        return Returned(rows_XH, checkpoint_name(accepted_SP.reshape(-1), "route_plan"))

    def accepted(self, returned: Sequence[Returned], plan: TokenPlan) -> jax.Array:
        """bool [T,K]: which assignments were sent and accepted."""
        bits_TK = _bits(returned)[jnp.maximum(plan.place_TK, 0)]
        return plan.sent_TK & (jnp.right_shift(bits_TK, plan.nth_TK) % 2 == 1)

    def combine(
        self, returned: Sequence[Returned], weights_TK: jax.Array, accepted_TK: jax.Array, plan: TokenPlan
    ) -> jax.Array:
        """[T,H]: the sum of what came back of each token; the experts have weighted it."""
        rows_XH = jnp.concatenate([wave.rows_QH for wave in returned])
        layout = self._layout(rows_XH.shape[1])
        # Slots of which nothing was accepted hold nothing, and each of the others is its first assignment's.
        filled_Q = _bits(returned) > 0
        first_X = layout.by_row(jnp.where(filled_Q, plan.assignment_QJ[:, 0], -1))
        mine_TK = (plan.nth_TK == 0) & plan.sent_TK & filled_Q[jnp.maximum(plan.place_TK, 0)]
        place_TK = layout.rows_of(jnp.where(mine_TK, plan.place_TK, -1))
        if not self.settings.rescale:
            token_X = quotient(first_X, self.shape.experts_per_token)
            # Gradients need the sum (of the layer above), not what it was summed of.
            return checkpoint_name(sum_moved_rows(rows_XH, place_TK, token_X), "returned_rows")
        scale_T1 = survivors_scale(plan.weights_TK, plan.valid_T, accepted_TK)
        return combine_rows(rows_XH, jnp.broadcast_to(scale_T1, place_TK.shape), place_TK, first_X, rows_XH.dtype)

    def _layout(self, width: int) -> Layout:
        return Layout(self.pool_rows, 2**self.per_slot - 1, width)


def _bits(returned: Sequence[Returned]) -> jax.Array:
    """int32: a bit for each accepted assignment of the slots of all waves."""
    return jnp.concatenate([wave.accepted_Q for wave in returned if wave.accepted_Q is not None])


def pooled_transport(settings: EPConfig, shape: LayerShape) -> PooledWave | PooledTokens:
    """`pooled_wave` with what `ep.slots` says in its slots."""
    return (PooledTokens if settings.slots == "token" else PooledWave)(settings, shape)
