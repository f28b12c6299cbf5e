"""Many capacity factors in one pass over recorded routing, exactly as `ep_jax.ep.simulate` decides for each.

Letters: S ep shards, T tokens per shard, K choices, I sender factors, J receiver factors, M and N capacities that a
sender and a receiver have (one each, one per wave at an agreed receiver, or none).

Limits are traced numbers and buffers have the size of the largest factor, so that no factor compiles anything, and
ranks are computed once. A buffer only has to be large enough: what is kept depends on the limits alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ep_jax.ep.capacity import Capacity, LayerShape
from ep_jax.ep.drops import KEPT
from ep_jax.ep.settings import EPConfig
from ep_jax.ep.simulate import Limits, ShardGroup, agree, exchange_pooled, fates_under, own_limits, shard_group


def simulate_factors(
    expert_ids_STK: jax.typing.ArrayLike,
    weights_STK: jax.typing.ArrayLike,
    valid_ST: jax.typing.ArrayLike,
    *,
    num_experts: int,
    sequence_length: int,
    settings: EPConfig,
    senders: Sequence[float],
    receivers: Sequence[Sequence[float]],
) -> jax.Array:
    """int8 [I,J,S,T,K]: what `simulate` says for each of I sender factors with each of J receiver factors of its own.

    The factors of `settings` size the buffers, so they must be the largest; all else of it holds for every pair. Expert
    ids may be of any integer type. Raises ValueError for a larger factor, ConfigError for one that int32 cannot hold.
    """
    sizes = dict(num_experts=num_experts, sequence_length=sequence_length, settings=settings)
    numbers = _numbers(settings, _shape_of(expert_ids_STK, num_experts), tuple(senders), tuple(map(tuple, receivers)))
    return _for_all(expert_ids_STK, weights_STK, valid_ST, *numbers, result=fates_under, **sizes)


def count_factors(
    expert_ids_STK: jax.typing.ArrayLike,
    weights_STK: jax.typing.ArrayLike,
    valid_ST: jax.typing.ArrayLike,
    *,
    num_experts: int,
    sequence_length: int,
    settings: EPConfig,
    senders: Sequence[float],
    receivers: Sequence[Sequence[float]],
) -> jax.Array:
    """int32 [I,J,2]: how many assignments senders and receivers drop; arguments and errors as `simulate_factors`.

    The same plans, counted where they decide, without the way back to each assignment: a tenth of the work.
    """
    sizes = dict(num_experts=num_experts, sequence_length=sequence_length, settings=settings)
    numbers = _numbers(settings, _shape_of(expert_ids_STK, num_experts), tuple(senders), tuple(map(tuple, receivers)))
    return _for_all(expert_ids_STK, weights_STK, valid_ST, *numbers, result=_drops, **sizes)


@dataclasses.dataclass(frozen=True)
class _Within(Capacity):
    """A capacity whose numbers are traced, in buffers of `rows`."""

    rows: int

    def static_rows(self, count: int) -> int:
        return self.rows


@functools.lru_cache(maxsize=1024)
def _numbers(
    settings: EPConfig, shape: LayerShape, senders: tuple[float, ...], receivers: tuple[tuple[float, ...], ...]
) -> tuple[np.ndarray, ...]:
    """(int32 [I,M,3] of senders, int32 [I,J,N,3] of receivers): numerator, divisor, at_most of all capacities."""
    largest = (settings.sender_factor, settings.receiver_factor)
    if max(senders) > largest[0] or max(map(max, receivers)) > largest[1]:
        raise ValueError(f"factors {senders} and {receivers}: buffers are sized for {largest}")
    limits = [
        [
            own_limits(dataclasses.replace(settings, sender_factor=sender, receiver_factor=receiver), shape)
            for receiver in with_it
        ]
        for sender, with_it in zip(senders, receivers, strict=True)
    ]
    sender_IM3 = [[dataclasses.astuple(capacity) for capacity in row[0].senders] for row in limits]
    receiver_IJN3 = [[[dataclasses.astuple(capacity) for capacity in pair.receivers] for pair in row] for row in limits]
    return tuple(np.array(x, np.int32) for x in (sender_IM3, receiver_IJN3))


@functools.partial(jax.jit, static_argnames=("result", "num_experts", "sequence_length", "settings"))
def _for_all(
    ids_STK: jax.Array,
    weights_STK: jax.Array,
    valid_ST: jax.Array,
    sender_IM3: jax.Array,
    receiver_IJN3: jax.Array,
    *,
    result: Callable[[ShardGroup, Limits], jax.Array],
    num_experts: int,
    sequence_length: int,
    settings: EPConfig,
) -> jax.Array:
    """[I,J,...]: `result` of every pair. What depends on no limit runs once, what on the sender's alone I times."""
    group = shard_group(ids_STK, weights_STK, valid_ST, num_experts, sequence_length, settings)
    own = own_limits(group.settings, group.shape)

    def of_pair(sender_M3: Any, receiver_N3: Any) -> jax.Array:
        senders = [_Within(*sender_M3[m], rows=c.static_rows(group.shape.tokens)) for m, c in enumerate(own.senders)]
        receivers = [_Within(*receiver_N3[n], rows=0) for n, _ in enumerate(own.receivers)]  # no buffer comes of them
        return result(group, Limits(tuple(senders), tuple(receivers)))

    return jax.vmap(jax.vmap(of_pair, in_axes=(None, 0)))(sender_IM3, receiver_IJN3)


def _drops(group: ShardGroup, limits: Limits) -> jax.Array:
    """int32 [2]: drops of senders and receivers."""
    valid = _count(group.routes.valid_T) * group.shape.experts_per_token
    if group.settings.transport == "pooled_wave":
        place_STK, accepted_DWSPJ = exchange_pooled(group, limits)
        sent, accepted = _count(place_STK >= 0), _count(accepted_DWSPJ)
    elif "agreed" in group.settings.used:
        sent, accepted = valid, jnp.sum(agree(group, limits), dtype=jnp.int32)
    else:
        sent = accepted = _count(fates_under(group, limits) == KEPT)  # what is sent is kept
    return jnp.stack([valid - sent, sent - accepted])


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.int32)


def _shape_of(expert_ids_STK: Any, num_experts: int) -> LayerShape:
    shards, tokens, choices = expert_ids_STK.shape
    return LayerShape(shards, num_experts, choices, tokens)
