"""Ranks by blocks and by sorting are those of a loop, for every size around a block and any ids.

Run: python -m pytest tests/ep/test_ranking.py
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from ep_jax.ep import ranking
from ep_jax.ep.ranking import BLOCK, MOST_GROUPS_FOR_SCAN, count_groups, rank_in_group

RANK = jax.jit(rank_in_group, static_argnums=1)


def ranks_of(ids, num_groups):
    """(wanted rank of each element in 0..num_groups-1, which elements these are), by a loop."""
    seen, ranks = {}, []
    for group in ids.tolist():
        ranks.append(seen.get(group, 0))
        seen[group] = ranks[-1] + 1
    return np.array(ranks, np.int32), (ids >= 0) & (ids < num_groups)


def check(ids, num_groups, rank=RANK):
    found = rank(jnp.asarray(ids, jnp.int32), num_groups)
    assert found.dtype == jnp.int32
    assert found.shape == ids.shape
    wanted, inside = ranks_of(ids, num_groups)
    np.testing.assert_array_equal(np.asarray(found)[inside], wanted[inside])


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 3])
def test_every_size_around_a_block(size):
    for seed in range(5):
        check(np.random.default_rng(seed).integers(-2, 6, size), 4)


@pytest.mark.parametrize("num_groups", [1, 8, MOST_GROUPS_FOR_SCAN, MOST_GROUPS_FOR_SCAN + 1, 300])
@hypothesis.given(seed=st.integers(0, 2**31), skew=st.sampled_from([0.2, 1.0, 5.0]))
def test_any_ids(num_groups, seed, skew):
    """Skewed ids, also below 0 and at or above num_groups, which take no rank of others."""
    rng = np.random.default_rng(seed)
    check((rng.random(1000) ** skew * (num_groups + 4)).astype(int) - 2, num_groups)


@pytest.mark.parametrize("num_groups", [5, 100])
def test_over_shards(num_groups):
    """A vmap ranks each shard by itself."""
    ids = np.random.default_rng(0).integers(-1, num_groups, (3, 200))
    found = jax.jit(jax.vmap(functools.partial(rank_in_group, num_groups=num_groups)))(jnp.asarray(ids, jnp.int32))
    for shard, ranks in zip(ids, found, strict=True):
        wanted, inside = ranks_of(shard, num_groups)
        np.testing.assert_array_equal(np.asarray(ranks)[inside], wanted[inside])


def test_both_ways_agree(monkeypatch):
    ids = np.random.default_rng(1).integers(0, 30, 4000)
    blocks = rank_in_group(jnp.asarray(ids, jnp.int32), 30)
    monkeypatch.setattr(ranking, "MOST_GROUPS_FOR_SCAN", 0)
    np.testing.assert_array_equal(blocks, rank_in_group(jnp.asarray(ids, jnp.int32), 30))
    assert count_groups(jnp.asarray(ids, jnp.int32), 30).tolist() == np.bincount(ids, minlength=30).tolist()


def test_int32_under_x64():
    with jax.enable_x64(True):
        for num_groups in (4, 100):
            check(np.random.default_rng(2).integers(-1, num_groups, 100), num_groups, rank_in_group)
