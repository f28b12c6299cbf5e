"""The integer plans of every transport against the oracle, for 64 shards at once.

Plan functions have no collectives, so 64 shards are a `vmap` with the exchange as a transpose; the transports
themselves run under a named `vmap` axis. Every row is then where the oracle says, to the row.
"""

import bisect
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from ep_jax.ep import EPConfig, payload, ragged, ranking, reference
from ep_jax.ep.agreement import fill, round_robin
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.layer import make_transport
from ep_jax.ep.pooled_wave import plan_receiver, plan_sender
from ep_jax.ep.ranking import count_groups, from_rank_order, invert, rank_in_group, to_rank_order
from ep_jax.ep.reference import KEPT, RECEIVER, SENDER
from ep_jax.ep.routes import Routes
from tests.ep import ep_cases

SEEDS = st.integers(0, 2**31)
FILL, ROUND_ROBIN = jax.jit(fill), jax.jit(jax.vmap(round_robin))

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
    ranks = rank_in_group(jnp.zeros(600, jnp.int32), num_groups)
    assert ranks.tolist() == list(range(600))


@hypothesis.given(st.lists(st.integers(-3, 9), min_size=30, max_size=30))
def test_count_groups(ids):
    counts = count_groups(jnp.asarray(ids, jnp.int32), 7)
    assert counts.dtype == jnp.int32
    assert counts.tolist() == [ids.count(group) for group in range(7)]


@pytest.mark.parametrize("spare", [0, 9])
@hypothesis.given(seed=SEEDS)
def test_invert(spare, seed):
    rng, size = np.random.default_rng(seed), 30
    place = np.where(rng.random(size) < 0.7, rng.permutation(size + spare)[:size], -1)
    index = np.asarray(invert(jnp.asarray(place, jnp.int32), size + spare))
    assert index.tolist() == [list(place).index(p) if p in place else -1 for p in range(size + spare)]


@pytest.mark.parametrize("order", ["sequence", "position"])
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


@hypothesis.given(seed=SEEDS)
def test_round_robin(seed):
    rng = np.random.default_rng(seed)
    counts, pool = rng.integers(0, 9, (5, 4, 3)), rng.integers(0, 60, 5)
    counts[0, :, 1] = 0
    kept = ROUND_ROBIN(jnp.asarray(counts, jnp.int32), jnp.asarray(pool, jnp.int32))
    wanted = [reference.round_robin(c.T.tolist(), p) for c, p in zip(counts, pool.tolist(), strict=True)]
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
    rows = jnp.asarray(rng.normal(size=(3, slots, width)), jnp.bfloat16)
    packed = payload.pack(jnp.asarray(numbers, jnp.int32), rows, local_experts)
    assert packed.dtype == jnp.bfloat16
    assert packed.shape == (3, payload.header_rows(slots, local_experts, width) + slots, width)
    found, found_rows = payload.unpack(packed, slots, local_experts)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, numbers)
    ep_cases.check_same_bits(found_rows, rows)


def test_digits_are_few_and_exact():
    assert [payload.lanes_per_slot(largest) for largest in (1, 255, 256, 65535, 65536)] == [1, 1, 2, 2, 3]
    assert payload.header_rows(slots=4711, largest=8, width=512) == 10


# --- pooled_wave: 64 shards, the exchange is a transpose --------------------------------------------------------------

SHARDS, TOKENS, LENGTH = 64, 8, 4
POOLED = [
    dict(waves=1, order="sequence", sender_factor=0.8, receiver_factor=0.8),
    dict(waves=3, order="position", sender_factor=1.0, receiver_factor=0.6),
    dict(waves=2, order="position", sender_factor=1000.0, receiver_factor=1000.0),
]
RAGGED = [dict(waves=waves, updates_per_cell=n, receiver_factor=f) for waves, n, f in [(1, 1, 0.8), (2, 3, 1.0)]]
SHAPES = [LayerShape(SHARDS, 3 * SHARDS, 2, TOKENS), LayerShape(SHARDS, SHARDS, 1, TOKENS)]


def draw_routes(seed, shape):
    """Skewed ids [S,T,K] and valid [S,T]; one shard has no valid token."""
    rng = np.random.default_rng(seed)
    scores = (
        rng.gumbel(size=(shape.num_shards, shape.tokens, shape.num_experts)) + rng.gumbel(size=shape.num_experts) * 2
    )
    ids = np.argsort(-scores, axis=-1)[..., : shape.experts_per_token].astype(np.int32)
    valid = rng.random((shape.num_shards, shape.tokens)) < 0.8
    valid[5] = False
    return ids, valid


def oracle_fates(ids, valid, shape, settings):
    return reference.fates(
        ids,
        np.ones(ids.shape),
        valid,
        num_experts=shape.num_experts,
        sequence_length=LENGTH,
        policy=ep_cases.policy_of(settings),
    )


def routes_of(ids_TK, valid_T, group_valid) -> Routes:
    return Routes(ids_TK, jnp.ones(ids_TK.shape), valid_T, group_valid, LENGTH)


@functools.cache
def pooled_plans(shape, settings):
    """(ids [S,T,K], valid [S,T]) -> (place [S,T,K], row of every slot [source, W, destination, P]), jitted."""
    transport = make_transport(settings, shape)
    waves, slots, local = transport.waves, transport.pool_rows, shape.local_experts

    def plans(ids, valid):
        total = jnp.sum(valid, dtype=jnp.int32)

        def sender(ids_TK, valid_T):
            routes = routes_of(ids_TK, valid_T, total)
            return plan_sender(routes, shape, transport.pool, settings.order, waves)

        place, _, local_id = jax.vmap(sender)(ids, valid)
        sent = local_id.reshape(shape.num_shards, waves, shape.num_shards, slots)
        limit = transport.receiver.logical_rows(total)
        receive = functools.partial(plan_receiver, limit=limit, rows=transport.expert_rows, local_experts=local)
        arrival = jax.vmap(jax.vmap(receive))(sent.transpose(2, 1, 0, 3))  # [destination, W] of [source, P]
        return place, arrival.row_SP.transpose(2, 1, 0, 3)

    return jax.jit(plans)


@pytest.mark.parametrize("shape", SHAPES, ids=["e3", "e1"])
@pytest.mark.parametrize("options", POOLED, ids=lambda options: f"W{options['waves']}")
@hypothesis.settings(max_examples=5)
@hypothesis.given(seed=SEEDS)
def test_pooled_plans_are_the_oracles(shape, options, seed):
    settings = EPConfig(**options)
    slots = make_transport(settings, shape).pool_rows
    ids, valid = draw_routes(seed, shape)
    place, row_of_slot = map(np.asarray, pooled_plans(shape, settings)(ids, valid))
    wanted = oracle_fates(ids, valid, shape, settings)

    sent = place >= 0
    np.testing.assert_array_equal(sent, (wanted.fate == KEPT) | (wanted.fate == RECEIVER))
    wave, destination, slot = np.unravel_index(np.where(sent, place, 0), (settings.waves, SHARDS, slots))
    for found, name in ((wave, "wave"), (destination, "destination"), (slot, "slot")):
        np.testing.assert_array_equal(np.where(sent, found, -1), getattr(wanted, name), err_msg=name)
    source = np.arange(SHARDS)[:, None, None]
    row = np.where(sent, row_of_slot[source, wave, destination, slot], -1)
    np.testing.assert_array_equal(row, wanted.row)
    if settings.sender_factor == 1000.0:
        assert not np.isin(wanted.fate, (SENDER, RECEIVER)).any()
    elif shape.experts_per_token > 1:
        assert {SENDER, RECEIVER} <= set(wanted.fate.reshape(-1).tolist())


# --- every transport: tagged rows arrive in the oracle's rows ---------------------------------------------------------


@functools.cache
def arrivals(shape, settings):
    """(ids, valid, rows [S,T,1]) -> per wave (buffer rows [S,N,1], rows per local expert [S,e of the wave]), jitted."""
    transport = make_transport(settings, shape)

    def local(ids_TK, valid_T, rows_TH):
        plan = transport.plan(routes_of(ids_TK, valid_T, lax.psum(jnp.sum(valid_T, dtype=jnp.int32), "ep")))
        received = []
        for wave in range(transport.waves):
            held, _ = transport.dispatch(rows_TH, plan, wave, 0)
            if settings.transport == "ragged":
                received.append((held.rows_NH, held.sizes_e))
            else:
                received.append((held.rows_eRH.reshape(-1, rows_TH.shape[1]), jnp.zeros(0, jnp.int32)))
        return received

    return jax.jit(jax.vmap(local, axis_name="ep", axis_size=shape.num_shards))


CASES = [("pooled_wave", options) for options in POOLED] + [("ragged", options) for options in RAGGED]


@pytest.mark.parametrize(("transport", "options"), CASES, ids=lambda case: str(case).replace("'", ""))
def test_every_row_arrives_where_the_oracle_says(monkeypatch, transport, options):
    # A batching rule for the real operation does not exist; the emulation is compared with it in this file.
    monkeypatch.setattr(ragged, "_ragged_all_to_all", ragged._emulated)
    settings, shape = EPConfig(transport=transport, **options), SHAPES[0]
    tags = 1 + np.arange(SHARDS * TOKENS, dtype=np.float32).reshape(SHARDS, TOKENS, 1)
    for seed in range(3):
        ids, valid = draw_routes(seed, shape)
        received = arrivals(shape, settings)(ids, valid, tags)
        wanted = oracle_fates(ids, valid, shape, settings)
        for wave, (rows, sizes) in enumerate(received):
            here = (wanted.fate == KEPT) & (wanted.wave == wave)
            expected = np.zeros(rows.shape, np.float32)
            source, token, _ = np.nonzero(here)
            expected[wanted.destination[here], wanted.row[here]] = tags[source, token]
            np.testing.assert_array_equal(np.asarray(rows), expected)
            if transport == "ragged":
                group = sizes.shape[1]
                experts = np.arange(SHARDS)[:, None] * shape.local_experts + wave * ragged_group(settings, shape)
                experts = experts + np.arange(group)
                np.testing.assert_array_equal(sizes, np.bincount(ids[here], minlength=shape.num_experts)[experts])
        assert (wanted.fate == RECEIVER).any() == (settings.receiver_factor < 1000.0)


def ragged_group(settings, shape) -> int:
    return -(-shape.local_experts // settings.waves)


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
