"""The fate of every assignment of an ep group of any size, on one device: the transports' own plan functions.

Letters: S ep shards, E experts, e local experts, T tokens per shard, K choices, W waves, P pool slots, J entries of a
slot, Q = W*S*P*J.

Plans are integer functions of one shard's arrays, so a shard axis is a `vmap` and the exchange a transpose. No rows, no
values: routing recorded anywhere can be replayed through every policy, for 64 shards as for 8. Nothing is decided here;
what is kept is decided where training decides it. Many capacity factors at once: `ep_jax.replay.factors`.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ep_jax.ep.agreed import Receivers, in_cells
from ep_jax.ep.capacity import Capacity, LayerShape
from ep_jax.ep.drops import fates
from ep_jax.ep.fixed_cell import FixedCell, plan_cells
from ep_jax.ep.pooled_tokens import pooled_transport
from ep_jax.ep.ranking import count_groups
from ep_jax.ep.routes import Routes
from ep_jax.ep.settings import EPConfig


@functools.partial(jax.jit, static_argnames=("num_experts", "sequence_length", "settings"))
def simulate(
    expert_ids_STK: jax.typing.ArrayLike,
    weights_STK: jax.typing.ArrayLike,
    valid_ST: jax.typing.ArrayLike,
    *,
    num_experts: int,
    sequence_length: int,
    settings: EPConfig,
) -> jax.Array:
    """int8 [S,T,K]: the fate of each assignment under `settings` (0 kept, 1 sender, 2 receiver, 3 invalid).

    The arrays are those of `routed_experts` (int32, float32, bool) with a leading axis for the shards of one ep group.
    num_experts must be a multiple of S, and T of sequence_length.
    """
    group = shard_group(expert_ids_STK, weights_STK, valid_ST, num_experts, sequence_length, settings)
    return fates_under(group, own_limits(settings, group.shape))


class Limits(NamedTuple):
    """The capacities that decide; empty where a transport has none."""

    senders: tuple[Capacity, ...]  # one or none
    receivers: tuple[Capacity, ...]  # of each wave of an agreed transport, one for all waves of pooled_wave


def own_limits(settings: EPConfig, shape: LayerShape) -> Limits:
    """The capacities of the transport that `settings` name. Raises ConfigError for a factor that int32 cannot hold."""
    if settings.transport == "pooled_wave":
        pooled = pooled_transport(settings, shape)
        return Limits((pooled.pool,), (pooled.receiver,))
    if settings.transport == "fixed_cell":
        return Limits((FixedCell(settings, shape).cell,), ())
    if "agreed" in settings.used:
        receivers = Receivers(settings, shape)
        return Limits((), tuple(receivers.capacity(wave) for wave in range(receivers.waves)))
    return Limits((), ())


class ShardGroup(NamedTuple):
    """One ep group with the shard axis first in all arrays."""

    settings: EPConfig
    shape: LayerShape
    premix: int  # members of a pre-mix group, 1 where there is none
    routes: Routes  # as senders see them, after the pre-mix


def shard_group(
    expert_ids_STK: jax.typing.ArrayLike,
    weights_STK: jax.typing.ArrayLike,
    valid_ST: jax.typing.ArrayLike,
    num_experts: int,
    sequence_length: int,
    settings: EPConfig,
) -> ShardGroup:
    """The ep group of the arguments of `simulate`; expert ids may be of any integer type."""
    ids_STK, valid_ST = jnp.asarray(expert_ids_STK).astype(jnp.int32), jnp.asarray(valid_ST)
    shards, tokens, choices = ids_STK.shape
    premix = settings.premix if "premix" in settings.used else 1
    column_ST = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[None] % sequence_length, valid_ST.shape)
    ids, weights, valid, column = (_mix(x, premix) for x in (ids_STK, jnp.asarray(weights_STK), valid_ST, column_ST))
    routes = Routes(
        expert_ids_TK=ids,
        weights_TK=weights,
        valid_T=valid,
        group_valid=jnp.broadcast_to(jnp.sum(valid_ST, dtype=jnp.int32), (shards,)),
        sequence_length=sequence_length,
        position_T=column if premix > 1 else None,
    )
    return ShardGroup(settings, LayerShape(shards, num_experts, choices, tokens), premix, routes)


def fates_under(group: ShardGroup, limits: Limits) -> jax.Array:
    """int8 [S,T,K]: the fates under `limits` and, in all else, the group's settings; at the original shards."""
    sent_STK, accepted_STK = _KEEP[group.settings.transport](group, limits)
    return _unmix(jax.vmap(fates)(group.routes.valid_T, sent_STK, accepted_STK), group.premix)


# --- one function a transport: (group, limits) -> (sent bool [S,T,K], accepted bool [S,T,K]) --------------------------


def _keep_pooled(group: ShardGroup, limits: Limits) -> tuple[jax.Array, jax.Array]:
    place_STK, accepted_DWSPJ = exchange_pooled(group, limits)
    accepted_SQ = accepted_DWSPJ.transpose(2, 1, 0, 3, 4).reshape(group.shape.num_shards, -1)  # and back
    taken_STK = jax.vmap(lambda accepted_Q, place_TK: accepted_Q[jnp.maximum(place_TK, 0)])(accepted_SQ, place_STK)
    return place_STK >= 0, (place_STK >= 0) & taken_STK


def exchange_pooled(group: ShardGroup, limits: Limits) -> tuple[jax.Array, jax.Array]:
    """(the entry int32 [S,T,K] of each assignment in a source's W*S*P*J, -1 unsent; bool [D,W,S,P,J]: which of them D
    receivers accept)."""
    shape, settings, [pool] = group.shape, group.settings, limits.senders
    transport = pooled_transport(settings, shape)
    place_STK, local_id_SQ = jax.vmap(lambda routes: transport.entries(routes, pool))(group.routes)
    entries = (settings.waves, shape.num_shards, pool.static_rows(shape.tokens), transport.per_slot)
    arriving_DWSPJ = local_id_SQ.reshape(-1, *entries).transpose(2, 1, 0, 3, 4)  # the exchange

    limit = limits.receivers[0].logical_rows(group.routes.group_valid[0])
    receive = jax.vmap(jax.vmap(lambda local_id_SPJ: transport.decide(local_id_SPJ, limit)))
    return place_STK, receive(arriving_DWSPJ)


def _keep_cells(group: ShardGroup, limits: Limits) -> tuple[jax.Array, jax.Array]:
    settings, [cell] = group.settings, limits.senders
    plan = functools.partial(plan_cells, shape=group.shape, capacity=cell, order=settings.order, waves=settings.waves)
    sent_STK = jax.vmap(plan)(group.routes).sent_TK
    return sent_STK, sent_STK


def _keep_agreed(group: ShardGroup, limits: Limits) -> tuple[jax.Array, jax.Array]:
    ids_STK = group.routes.valid_ids_TK
    ids_SA = ids_STK.reshape(group.shape.num_shards, -1)
    kept_SDe = agree(group, limits)
    kept_SA = jax.vmap(lambda ids_A, kept_De: in_cells(ids_A, kept_De).kept_A)(ids_SA, kept_SDe)
    return ids_STK >= 0, kept_SA.reshape(ids_STK.shape)


def agree(group: ShardGroup, limits: Limits) -> jax.Array:
    """int32 [S sources, S destinations, e]: the rows that each cell may send."""
    ids_SA = group.routes.valid_ids_TK.reshape(group.shape.num_shards, -1)
    counts_SE = jax.vmap(lambda ids_A: count_groups(ids_A, group.shape.num_experts))(ids_SA)
    receivers = _LimitedReceivers(group.settings, group.shape, limits.receivers)
    return receivers.keep(counts_SE, group.routes.group_valid[0])


@dataclasses.dataclass(frozen=True)
class _LimitedReceivers(Receivers):
    """Receivers of an agreed transport with the capacities of `limits`."""

    limits: tuple[Capacity, ...]

    def capacity(self, wave: int) -> Capacity:
        return self.limits[wave]


def _keep_all(group: ShardGroup, limits: Limits) -> tuple[jax.Array, jax.Array]:
    del limits
    everything = jnp.broadcast_to(group.routes.valid_T[..., None], group.routes.expert_ids_TK.shape)
    return everything, everything


_KEEP = {
    "pooled_wave": _keep_pooled,
    "fixed_cell": _keep_cells,
    "ragged": _keep_agreed,
    "rowwise": _keep_agreed,
    "ring": _keep_agreed,
    "dense": _keep_all,
}


def _mix(values_ST: jax.Array, group: int) -> jax.Array:
    """Deals rows out within groups of shards as `premix.py` does: (source member, t div g) at member t mod g."""
    blocks = values_ST.reshape(-1, group, values_ST.shape[1] // group, group, *values_ST.shape[2:])
    return jnp.moveaxis(blocks, 3, 1).reshape(values_ST.shape)


def _unmix(values_ST: jax.Array, group: int) -> jax.Array:
    blocks = values_ST.reshape(-1, group, group, values_ST.shape[1] // group, *values_ST.shape[2:])
    return jnp.moveaxis(blocks, 1, 3).reshape(values_ST.shape)
