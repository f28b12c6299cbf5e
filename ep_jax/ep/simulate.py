"""The fate of every assignment of an ep group of any size, on one device: the transports' own plan functions.

Letters: S ep shards, E experts, T tokens per shard, K choices, W waves, P pool slots, Q = W*S*P.

Plans are integer functions of one shard's arrays, so a shard axis is a `vmap` and the exchange a transpose. No rows, no
values: routing recorded anywhere can be replayed through every policy, for 64 shards as for 8. Nothing is decided here;
what is kept is decided where training decides it.
"""

import functools

import jax
import jax.numpy as jnp

from ep_jax.ep.agreed import Receivers
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.drops import fates
from ep_jax.ep.fixed_cell import FixedCell, plan_cells
from ep_jax.ep.pooled_wave import PooledWave, plan_sender
from ep_jax.ep.ranking import count_groups, rank_in_group
from ep_jax.ep.routes import Routes
from ep_jax.ep.settings import EPConfig


@functools.partial(jax.jit, static_argnames=("num_experts", "sequence_length", "settings"))
def simulate(
    expert_ids_STK: jax.Array,
    weights_STK: jax.Array,
    valid_ST: jax.Array,
    *,
    num_experts: int,
    sequence_length: int,
    settings: EPConfig,
) -> jax.Array:
    """int8 [S,T,K]: the fate of each assignment under `settings` (0 kept, 1 sender, 2 receiver, 3 invalid).

    The arrays are those of `routed_experts` (int32, float32, bool) with a leading axis for the shards of one ep group.
    num_experts must be a multiple of S, and T of sequence_length.
    """
    shards, tokens, choices = expert_ids_STK.shape
    shape = LayerShape(shards, num_experts, choices, tokens)
    group = settings.premix if "premix" in settings.used else 1
    column_ST = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[None] % sequence_length, valid_ST.shape)
    ids, weights, valid, column = (_mix(x, group) for x in (expert_ids_STK, weights_STK, valid_ST, column_ST))
    routes = Routes(
        expert_ids_TK=ids,
        weights_TK=weights,
        valid_T=valid,
        group_valid=jnp.broadcast_to(jnp.sum(valid_ST, dtype=jnp.int32), (shards,)),
        sequence_length=sequence_length,
        position_T=column if group > 1 else None,
    )
    sent, accepted = _KEEP[settings.transport](routes, shape, settings)
    return _unmix(jax.vmap(fates)(valid, sent, accepted), group)


def _keep_pooled(routes: Routes, shape: LayerShape, settings: EPConfig) -> tuple[jax.Array, jax.Array]:
    transport = PooledWave(settings, shape)
    plan = functools.partial(plan_sender, shape=shape, pool=transport.pool, order=settings.order, waves=settings.waves)
    place_STK, _, local_id_SQ = jax.vmap(plan)(routes)
    slots = (shape.num_shards, settings.waves, shape.num_shards, transport.pool_rows)
    arriving_DWSP = local_id_SQ.reshape(slots).transpose(2, 1, 0, 3)  # the exchange

    limit = transport.receiver.logical_rows(routes.group_valid[0])
    receive = jax.vmap(jax.vmap(lambda local_id_SP: transport.accept(local_id_SP, limit).row_SP >= 0))
    accepted_SQ = receive(arriving_DWSP).transpose(2, 1, 0, 3).reshape(shape.num_shards, -1)  # and back
    taken_STK = jax.vmap(lambda accepted_Q, place_TK: accepted_Q[jnp.maximum(place_TK, 0)])(accepted_SQ, place_STK)
    return place_STK >= 0, (place_STK >= 0) & taken_STK


def _keep_cells(routes: Routes, shape: LayerShape, settings: EPConfig) -> tuple[jax.Array, jax.Array]:
    cell = FixedCell(settings, shape).cell
    plans = jax.vmap(lambda shard: plan_cells(shard, shape, cell, settings.order, settings.waves))(routes)
    return plans.sent_TK, plans.sent_TK


def _keep_agreed(routes: Routes, shape: LayerShape, settings: EPConfig) -> tuple[jax.Array, jax.Array]:
    ids_STK = routes.valid_ids_TK  # with the shard axis in front
    ids_SA = ids_STK.reshape(shape.num_shards, -1)
    counts_SE = jax.vmap(lambda ids_A: count_groups(ids_A, shape.num_experts))(ids_SA)
    kept_SDe = Receivers(settings, shape).keep(counts_SE, routes.group_valid[0])
    rank_SA = jax.vmap(lambda ids_A: rank_in_group(ids_A, shape.num_experts))(ids_SA)
    kept_SE = kept_SDe.reshape(shape.num_shards, shape.num_experts)
    kept_SA = (ids_SA >= 0) & (rank_SA < jnp.take_along_axis(kept_SE, jnp.maximum(ids_SA, 0), axis=1))
    return ids_STK >= 0, kept_SA.reshape(ids_STK.shape)


def _keep_all(routes: Routes, shape: LayerShape, settings: EPConfig) -> tuple[jax.Array, jax.Array]:
    del shape, settings
    everything = jnp.broadcast_to(routes.valid_T[..., None], routes.expert_ids_TK.shape)
    return everything, everything


# transport -> (routes of all shards, shape, settings) -> (sent [S,T,K], accepted [S,T,K])
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
