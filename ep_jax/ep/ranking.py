"""Ranks of assignments within their group, in a chosen order: the integer core of every routing plan.

Letters: T tokens, K choices, A = T*K assignments, G groups, L sequence length. Pure integer functions of one shard's
arrays, without collectives.
"""

import jax
import jax.numpy as jnp

from ep_jax.ep.routes import Routes

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


def rank_assignments(group_TK: jax.Array, num_groups: int, order: str, routes: Routes) -> jax.Array:
    """int32 [T,K]: how many assignments of the same group come first in `order` (DESIGN: sender order)."""
    if order == "weight":  # largest combine weight first, ties in flat order
        first_A = jnp.argsort(-jax.lax.stop_gradient(routes.weights_TK).reshape(-1), stable=True)
        rank_A = rank_in_group(group_TK.reshape(-1)[first_A], num_groups)
        return jnp.zeros_like(rank_A).at[first_A].set(rank_A, unique_indices=True).reshape(group_TK.shape)
    arranged_A = to_rank_order(group_TK, order, routes.sequence_length, routes.position_T)
    rank_A = rank_in_group(arranged_A, num_groups)
    return from_rank_order(rank_A, order, routes.sequence_length, group_TK.shape[1], routes.position_T)


def to_rank_order(
    values_TK: jax.Array, order: str, sequence_length: int, position_T: jax.Array | None = None
) -> jax.Array:
    """[T,K] in flat order -> [A] in the order in which assignments rank.

    "sequence": flat. "position": by (position, sequence, k), which spreads overflow over sequences. "choice": by
    (k, position, sequence). position_T: where tokens do not lie in whole sequences (pre-mix); None: t mod length.
    """
    if order == "sequence":
        return values_TK.reshape(-1)
    num_tokens, choices = values_TK.shape
    if position_T is None:
        sequences = values_TK.reshape(num_tokens // sequence_length, sequence_length, choices)
        by_position_TK = sequences.swapaxes(0, 1).reshape(num_tokens, choices)
    else:
        by_position_TK = values_TK[jnp.argsort(position_T, stable=True)]
    return (by_position_TK.T if order == "choice" else by_position_TK).reshape(-1)


def from_rank_order(
    values_A: jax.Array, order: str, sequence_length: int, choices: int, position_T: jax.Array | None = None
) -> jax.Array:
    """Inverse of `to_rank_order`: [A] -> [T,K]."""
    num_tokens = values_A.size // choices
    if order == "sequence":
        return values_A.reshape(num_tokens, choices)
    by_position_TK = values_A.reshape(choices, num_tokens).T if order == "choice" else values_A.reshape(-1, choices)
    if position_T is None:
        columns = by_position_TK.reshape(sequence_length, num_tokens // sequence_length, choices)
        return columns.swapaxes(0, 1).reshape(num_tokens, choices)
    token_T = jnp.argsort(position_T, stable=True)
    return jnp.zeros_like(by_position_TK).at[token_T].set(by_position_TK, unique_indices=True)


def invert(place_A: jax.Array, num_places: int) -> jax.Array:
    """int32 [num_places]: the element placed there, -1 where none is. place_A holds unique places or -1."""
    target_A = jnp.where(place_A < 0, num_places, place_A)
    empty = jnp.full(num_places + 1, -1, jnp.int32)
    return empty.at[target_A].set(jnp.arange(place_A.size, dtype=jnp.int32))[:-1]
