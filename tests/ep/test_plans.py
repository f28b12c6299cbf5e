"""The parts of plans: ranks, agreements, ids in header lanes, and the emulation of the ragged exchange.

Whole plans are tested for 64 shards in `test_shards64`.
"""

import bisect
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from ep_jax.ep import EPConfig, payload, ragged, ranking, reference
from ep_jax.ep.agreement import AGREED, fill
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.ranking import count_groups, from_rank_order, invert, rank_in_group, to_rank_order
from tests.ep import ep_cases

SEEDS = st.integers(0, 2**31)
COUNT = jax.jit(count_groups, static_argnums=1)
FILL, AGREEMENTS = jax.jit(fill), {name: jax.jit(keep) for name, keep in AGREED.items()}

# --- ranks and inverses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most_groups_for_scan", [0, 64], ids=["sort", "scan"])
@pytest.mark.parametrize("num_groups", [1, 7, 64])
def test_rank_in_group(monkeypatch, most_groups_for_scan, num_groups):
    monkeypatch.setattr(ranking, "MOST_GROUPS_FOR_SCAN", most_groups_for_scan)
    run = jax.jit(functools.partial(rank_in_group, num_groups=num_groups))
    for seed in range(10):
        ids = np.random.default_rng(seed).integers(-1, num_groups, 150)
        ranks = run(jnp.asarray(ids, jnp.int32))
        assert ranks.dtype == jnp.int32
        wanted = np.array([list(ids[:i]).count(group) for i, group in enumerate(ids)])
        np.testing.assert_array_equal(np.asarray(ranks)[ids >= 0], wanted[ids >= 0])


@pytest.mark.parametrize("num_groups", [8, 100])  # either branch
def test_ranks_beyond_256_are_distinct(num_groups):
    ranks = jax.jit(functools.partial(rank_in_group, num_groups=num_groups))(jnp.zeros(600, jnp.int32))
    assert ranks.tolist() == list(range(600))


@hypothesis.given(st.lists(st.integers(-3, 9), min_size=30, max_size=30))
def test_count_groups(ids):
    counts = COUNT(jnp.asarray(ids, jnp.int32), 7)
    assert counts.dtype == jnp.int32
    assert counts.tolist() == [ids.count(group) for group in range(7)]


@pytest.mark.parametrize("spare", [0, 9])
@hypothesis.given(seed=SEEDS)
def test_invert(spare, seed):
    rng, size = np.random.default_rng(seed), 30
    place = np.where(rng.random(size) < 0.7, rng.permutation(size + spare)[:size], -1)
    index = np.asarray(invert(jnp.asarray(place, jnp.int32), size + spare))
    assert index.tolist() == [list(place).index(p) if p in place else -1 for p in range(size + spare)]


@pytest.mark.parametrize("order", ["sequence", "position", "choice"])
def test_rank_order_is_the_oracles(order):
    tokens, choices, length = 12, 2, 4
    flat = jnp.arange(tokens * choices, dtype=jnp.int32).reshape(tokens, choices)
    assignments = reference.list_assignments(
        np.zeros((1, tokens, choices)), np.zeros((1, tokens, choices)), np.ones((1, tokens), bool), length, 1
    )
    wanted = [a.token * choices + a.choice for a in sorted(assignments, key=reference.ORDERS[order])]
    ordered = to_rank_order(flat, order, length)
    assert ordered.tolist() == wanted
    assert from_rank_order(ordered, order, length, choices).tolist() == flat.tolist()


# --- agreement --------------------------------------------------------------------------------------------------------


@hypothesis.given(seed=SEEDS, most=st.sampled_from([1, 5, 1000, 2**27]))
def test_fill(seed, most):
    rng = np.random.default_rng(seed)
    demand, pool = rng.integers(0, most + 1, (7, 6)), rng.integers(0, 5 * most, 7)
    demand[0], demand[1, 1:], pool[2] = 0, 0, 0
    shares = FILL(jnp.asarray(demand, jnp.int32), jnp.asarray(pool, jnp.int32))
    assert shares.dtype == jnp.int32
    assert shares.tolist() == [fill_by_bisection(d, p) for d, p in zip(demand.tolist(), pool.tolist(), strict=True)]


def fill_by_bisection(demand, pool):
    """The oracle's `fill`, which counts its level up one by one and would take long at 2^27."""
    level = bisect.bisect_right(range(max(demand) + 1), pool, key=lambda level: sum(min(d, level) for d in demand)) - 1
    left = pool - sum(min(d, level) for d in demand)
    shares = []
    for d in demand:
        more = d > level and left > 0
        shares.append(min(d, level) + more)
        left -= more
    return shares


@hypothesis.given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(0, 50))
def test_bisection_is_the_oracles_fill(demand, pool):
    assert fill_by_bisection(demand, pool) == reference.fill(demand, pool)


@pytest.mark.parametrize("policy", AGREED)
@hypothesis.given(seed=SEEDS)
def test_agreed_rows_are_the_oracles(policy, seed):
    rng = np.random.default_rng(seed)
    counts, pool = rng.integers(0, 9, (5, 4, 3)), rng.integers(0, 60, 5)
    counts[0, :, 1] = 0
    kept = AGREEMENTS[policy](jnp.asarray(counts, jnp.int32), jnp.asarray(pool, jnp.int32))
    wanted = [reference.AGREEMENTS[policy](c.T.tolist(), p) for c, p in zip(counts, pool.tolist(), strict=True)]
    assert kept.swapaxes(1, 2).tolist() == wanted


# --- payload ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_experts", [1, 2, 255, 256, 257, 600])
def test_ids_survive_in_bfloat16(local_experts):
    check_payload(local_experts)


def test_ids_stay_int32_under_x64():
    with jax.enable_x64(True):
        check_payload(257)


def check_payload(local_experts):
    rng = np.random.default_rng(0)
    slots, width = 2 * local_experts + 3, 8  # several header rows, the last one not full
    numbers = np.stack([rng.permutation(slots) % (local_experts + 1) for _ in range(3)])
    layout = payload.Layout(slots, local_experts, width)
    pack, unpack, rows_of, by_row = map(jax.jit, (layout.pack, layout.unpack, layout.rows_of, layout.by_row))
    size = layout.header + slots
    rows = jnp.asarray(rng.normal(size=(3 * size, width)), jnp.bfloat16)
    packed = pack(jnp.asarray(numbers, jnp.int32), rows)
    assert packed.dtype == jnp.bfloat16
    assert packed.shape == (3, payload.header_rows(slots, local_experts, width) + slots, width)
    found, found_rows = unpack(packed)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, numbers)
    places = rows_of(jnp.arange(-1, 3 * slots, dtype=jnp.int32))
    wanted = [-1] + [peer * size + layout.header + slot for peer in range(3) for slot in range(slots)]
    np.testing.assert_array_equal(places, wanted)
    ep_cases.check_same_bits(found_rows[places[1:]], rows[places[1:]])
    slot_of = np.full(3 * size, -1)
    slot_of[wanted[1:]] = np.arange(3 * slots)
    np.testing.assert_array_equal(by_row(jnp.arange(3 * slots, dtype=jnp.int32)), slot_of)


def test_digits_are_few_and_exact():
    assert [payload.lanes_per_slot(largest) for largest in (1, 255, 256, 65535, 65536)] == [1, 1, 2, 2, 3]
    assert payload.header_rows(slots=4711, largest=8, width=512) == 10


# --- the emulated exchange --------------------------------------------------------------------------------------------


def ragged_model(rows, out_rows, first, sizes, to):
    """jax.lax.ragged_all_to_all in loops; sizes and offsets are [sender, receiver, update]. Empty rows are 0."""
    out = np.zeros((len(rows), out_rows, rows.shape[2]), rows.dtype)
    for sender, receiver, update in np.ndindex(sizes.shape):
        size, begin, end = (x[sender, receiver, update] for x in (sizes, first, to))
        out[receiver, end : end + size] = rows[sender, begin : begin + size]
    return out


EMULATED = jax.jit(
    lambda out_rows, *arguments: jax.vmap(functools.partial(ragged._emulated, out_rows), axis_name="ep")(*arguments),
    static_argnums=0,
)


@pytest.mark.parametrize("updates", [1, 3])
@hypothesis.given(seed=SEEDS)
def test_emulation_is_the_collective(updates, seed):
    rng, shards, in_rows, out_rows = np.random.default_rng(seed), 5, 30, 60
    rows = rng.normal(size=(shards, in_rows, 2)).astype(np.float32)
    sizes = rng.integers(0, 4, (shards, shards, updates))  # [sender, receiver, update]
    sizes[2] = 0  # a sender without rows
    sizes[:, 1] = 0  # a receiver without rows
    first = rng.integers(0, in_rows - 3, sizes.shape)  # senders may repeat rows
    to = np.zeros_like(sizes)
    for receiver in range(shards):  # disjoint places in random order, with gaps
        flat = sizes[:, receiver].reshape(-1)
        order, gaps = rng.permutation(flat.size), rng.integers(0, 2, flat.size)
        start = np.zeros_like(flat)
        start[order] = np.cumsum(flat[order] + gaps) - flat[order]
        to[:, receiver] = start.reshape(shards, updates)
    come = sizes.swapaxes(0, 1)
    arguments = [jnp.asarray(x.reshape(shards, -1), jnp.int32) for x in (first, sizes, to, come)]
    found = EMULATED(out_rows, jnp.asarray(rows), *arguments)
    np.testing.assert_array_equal(found, ragged_model(rows, out_rows, first, sizes, to))


@pytest.mark.parametrize(
    ("shape", "waves", "updates"),
    [
        (LayerShape(2, 16, 4, 16_384), 1, 64),  # bench shape A: 16 cells a shard
        (LayerShape(2, 16, 4, 16_384), 2, 128),  # half as many cells a wave
        (LayerShape(64, 384, 8, 4096), 1, 3),
        (LayerShape(64, 384, 8, 1024), 1, 2),  # cells of 21 rows, 8 of them an update at least
        (LayerShape(64, 384, 8, 64), 1, 1),
    ],
)
def test_updates_of_ragged_fill_a_gpu(monkeypatch, shape, waves, updates):
    transport = ragged.Ragged(EPConfig(transport="ragged", waves=waves), shape)
    assert transport.updates_per_cell == 1  # here, on the CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert transport.updates_per_cell == updates
    given = EPConfig(transport="ragged", waves=waves, updates_per_cell=5)
    assert ragged.Ragged(given, shape).updates_per_cell == 5
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert transport.updates_per_cell == 1  # NCCL would send each on its own
