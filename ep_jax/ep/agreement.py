"""Agreed acceptance: from everybody's counts, the rows that each (source, expert) cell may send.

Letters: S source shards (and destinations), e local experts of a destination, G experts of one wave. Pure integer
functions of the gathered counts: every shard computes the same answer before any row moves.
"""

import jax
import jax.numpy as jnp


def fill(demand_N: jax.Array, pool: jax.Array) -> jax.Array:
    """Shares `pool` rows over the last axis: everybody up to the largest level that fits, the rest one each by index.

    demand_N int32 [..., N], pool int32 [...]. Returns int32 [..., N] with sum min(sum(demand_N), pool). Compares all
    pairs of the last axis, which a backend that does not fuse keeps in memory.
    """
    # Below a demand that fits as a level for all, nobody's share grows any more; the others divide what is left evenly.
    # All demands are tried at once: a search in rounds would be that many launches before any row can move.
    filled_N = jnp.sum(jnp.minimum(demand_N[..., :, None], demand_N[..., None, :]), axis=-1)  # by each as the level
    fits_N = filled_N <= pool[..., None]
    level = jnp.max(jnp.where(fits_N, demand_N, 0), axis=-1)
    filled = jnp.max(jnp.where(fits_N, filled_N, 0), axis=-1)
    more = jnp.sum(demand_N > level[..., None], axis=-1, dtype=demand_N.dtype)
    level += (pool - filled) // jnp.maximum(more, 1) * (more > 0)
    shared_N = jnp.minimum(demand_N, level[..., None])
    wants_N = demand_N > level[..., None]
    left = pool - jnp.sum(shared_N, axis=-1)
    turn_N = jnp.cumsum(wants_N.astype(jnp.int32), axis=-1)
    return shared_N + (wants_N & (turn_N <= left[..., None])).astype(jnp.int32)


def round_robin(counts_SG: jax.Array, pool: jax.Array) -> jax.Array:
    """Kept rows of one destination: experts in order, each filled over its sources from the rows left.

    counts_SG int32 [..., S, G], pool int32 [...]; returns the same shape as counts_SG.
    """
    total_G = jnp.sum(counts_SG, axis=-2)
    before_G = jnp.cumsum(total_G, axis=-1) - total_G  # an expert takes min(its total, rows left), so a sum suffices
    left_G = jnp.maximum(pool[..., None] - before_G, 0)
    return fill(counts_SG.swapaxes(-1, -2), left_G).swapaxes(-1, -2)


def tail(counts_SG: jax.Array, pool: jax.Array) -> jax.Array:
    """Kept rows of one destination: local experts outer, sources inner, until the pool is full (OLMo-core's order).

    Shapes as in `round_robin`.
    """
    demand_GS = counts_SG.swapaxes(-1, -2)
    flat = demand_GS.reshape(*demand_GS.shape[:-2], -1)
    before = jnp.cumsum(flat, axis=-1) - flat
    kept = jnp.clip(pool[..., None] - before, 0, flat)
    return kept.reshape(demand_GS.shape).swapaxes(-1, -2)


def water_fill(counts_SG: jax.Array, pool: jax.Array) -> jax.Array:
    """Kept rows of one destination: filled over its experts, then over the sources of each.

    Shapes as in `round_robin`.
    """
    quota_G = fill(jnp.sum(counts_SG, axis=-2), pool)
    return fill(counts_SG.swapaxes(-1, -2), quota_G).swapaxes(-1, -2)


AGREED = {"tail": tail, "round_robin": round_robin, "water_fill": water_fill}
