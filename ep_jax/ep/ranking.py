"""Ranks of assignments within their group, in a chosen order: the integer core of every routing plan.

Letters: T tokens, K choices, A = T*K assignments, G groups, L sequence length, N blocks of B assignments. Pure integer
functions of one shard's arrays, without collectives.
"""

import jax
import jax.numpy as jnp

from ep_jax.ep.routes import Routes

# Up to this many groups, counting in blocks beats a sort: 16 to 41 times on an H200
# (benchmarks/experts_h200_20261130.json). Within a block all pairs are compared, so it is short. Counting alone, by
# comparison, is 2 to 7 times faster than one by one, and 3 times with 384 groups
# (benchmarks/balance_h200_20261130.json).
MOST_GROUPS_FOR_SCAN = 128
BLOCK = 16


def rank_in_group(group_A: jax.Array, num_groups: int) -> jax.Array:
    """Number of earlier elements with the same group id; elements outside 0..num_groups-1 get an unspecified rank."""
    if num_groups <= MOST_GROUPS_FOR_SCAN:
        return _rank_by_blocks(group_A, num_groups)
    group_A = jnp.where((group_A >= 0) & (group_A < num_groups), group_A, num_groups)
    order_A = jnp.argsort(group_A, stable=True)
    counts_G = count_groups(group_A, num_groups + 1)
    first_G = jnp.cumsum(counts_G) - counts_G
    rank_A = jnp.arange(group_A.size, dtype=jnp.int32) - first_G[group_A[order_A]]
    return jnp.zeros_like(rank_A).at[order_A].set(rank_A, unique_indices=True)


def _rank_by_blocks(group_A: jax.Array, num_groups: int) -> jax.Array:
    """Elements of the same group in earlier blocks, from the blocks' counts, and before it in its own block."""
    blocks = -(-group_A.size // BLOCK)
    group_NB = jnp.pad(group_A, (0, blocks * BLOCK - group_A.size), constant_values=-1).reshape(blocks, BLOCK)
    member_NBG = jax.nn.one_hot(group_NB, num_groups, dtype=bool)
    counts_NG = jnp.sum(member_NBG, axis=1, dtype=jnp.int32)
    before_NG = jnp.cumsum(counts_NG, axis=0) - counts_NG
    before_NB = jnp.take_along_axis(before_NG, jnp.clip(group_NB, 0, num_groups - 1), axis=1)
    earlier_BB = jnp.tril(jnp.ones((BLOCK, BLOCK), bool), -1)
    same_NBB = (group_NB[:, :, None] == group_NB[:, None, :]) & earlier_BB[None]
    return (before_NB + jnp.sum(same_NBB, axis=2, dtype=jnp.int32)).reshape(-1)[: group_A.size]


def count_groups(group_A: jax.Array, num_groups: int) -> jax.Array:
    """int32 [num_groups]: how many elements have each group id; ids outside 0..num_groups-1 are not counted.

    Few groups are compared with every element: added up one by one, elements of the same group wait for each other.
    """
    if num_groups <= MOST_GROUPS_FOR_SCAN:
        return jnp.sum(jax.nn.one_hot(group_A, num_groups, dtype=bool), axis=0, dtype=jnp.int32)
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
