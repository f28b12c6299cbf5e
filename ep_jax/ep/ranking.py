"""Ranks of assignments within their group, in a chosen order: the integer core of every routing plan.

Letters: T tokens, K choices, A = T*K assignments, G groups, L sequence length. Pure integer functions of one shard's
arrays, without collectives.
"""

import jax
import jax.numpy as jnp

# Up to this many groups a counted scan ([A, G] one-hot) beats a sort.
MOST_GROUPS_FOR_SCAN = 64


def rank_in_group(group_A: jax.Array, num_groups: int) -> jax.Array:
    """Number of earlier elements with the same group id; elements outside 0..num_groups-1 get an unspecified rank."""
    if num_groups <= MOST_GROUPS_FOR_SCAN:
        member_AG = (group_A[:, None] == jnp.arange(num_groups, dtype=group_A.dtype)[None]).astype(jnp.int32)
        before_AG = jnp.cumsum(member_AG, axis=0) - member_AG
        return jnp.sum(before_AG * member_AG, axis=1)
    group_A = jnp.where((group_A >= 0) & (group_A < num_groups), group_A, num_groups)
    order_A = jnp.argsort(group_A, stable=True)
    sorted_A = group_A[order_A]
    first_A = jnp.searchsorted(sorted_A, sorted_A, side="left").astype(jnp.int32)
    rank_A = jnp.arange(group_A.size, dtype=jnp.int32) - first_A
    return jnp.zeros_like(rank_A).at[order_A].set(rank_A, unique_indices=True)


def count_groups(group_A: jax.Array, num_groups: int) -> jax.Array:
    """int32 [num_groups]: how many elements have each group id; ids outside 0..num_groups-1 are not counted."""
    outside = (group_A < 0) | (group_A >= num_groups)
    return jnp.zeros(num_groups + 1, jnp.int32).at[jnp.where(outside, num_groups, group_A)].add(1)[:-1]


def to_rank_order(values_TK: jax.Array, order: str, sequence_length: int) -> jax.Array:
    """[T,K] in flat order -> [A] in the order in which assignments rank (DESIGN: sender order)."""
    num_tokens, choices = values_TK.shape
    if order == "sequence":
        return values_TK.reshape(-1)
    if order == "position":  # (position, sequence, k): overflow is spread over sequences
        values = values_TK.reshape(num_tokens // sequence_length, sequence_length, choices)
        return values.swapaxes(0, 1).reshape(-1)
    raise NotImplementedError(f"ep.order = {order!r}")


def from_rank_order(values_A: jax.Array, order: str, sequence_length: int, choices: int) -> jax.Array:
    """Inverse of `to_rank_order`: [A] -> [T,K]."""
    num_tokens = values_A.size // choices
    if order == "sequence":
        return values_A.reshape(num_tokens, choices)
    if order == "position":
        values = values_A.reshape(sequence_length, num_tokens // sequence_length, choices)
        return values.swapaxes(0, 1).reshape(num_tokens, choices)
    raise NotImplementedError(f"ep.order = {order!r}")


def invert(place_A: jax.Array, num_places: int) -> jax.Array:
    """int32 [num_places]: the element placed there, -1 where none is. place_A holds unique places or -1."""
    target_A = jnp.where(place_A < 0, num_places, place_A)
    empty = jnp.full(num_places + 1, -1, jnp.int32)
    return empty.at[target_A].set(jnp.arange(place_A.size, dtype=jnp.int32))[:-1]
