"""Capacities in rows: exact on the host and in int32 on the device, never 0, never more than can occur."""

import dataclasses
import functools
import itertools
from fractions import Fraction

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels.hopper import ALIGNED_ROWS
from hypothesis import strategies as st

from ep_jax.ep import EPConfig, reference
from ep_jax.ep.capacity import (
    INT32_LIMIT,
    WHOLE_ROWS,
    Capacity,
    LayerShape,
    cell,
    destination_rows,
    expert_rows,
    sender_pool,
    token_pool,
    whole_rows,
)
from ep_jax.ep.layer import make_transport
from ep_jax.ep.reference import Policy
from ep_jax.fields import ConfigError
from tests.ep import ep_cases
from tests.ep.ep_cases import Sizes, mesh_of, problem

DECIMAL_FACTORS = st.one_of(
    st.integers(1, 400).map(lambda hundredths: hundredths / 100), st.sampled_from([8.0, 1e3, 1e9])
)
SHAPES = st.builds(
    lambda shards, local, choices, tokens: LayerShape(shards, shards * local, min(choices, shards * local), tokens),
    st.sampled_from([1, 2, 3, 8, 64]),
    st.integers(1, 9),
    st.integers(1, 8),
    st.integers(1, 700),
)


@pytest.mark.parametrize(("experts", "choices", "given"), [(6, 2, 3), (7, 3, 1), (8, 4, 2), (5, 5, 2), (6, 1, 4)])
def test_crossing_share_counts_tokens_of_all_choices(experts, choices, given):
    shape = LayerShape(num_shards=1, num_experts=experts, experts_per_token=choices, tokens=1)
    met = [sum(expert < given for expert in chosen) for chosen in itertools.combinations(range(experts), choices)]
    assert shape.crossing_share(given) == pytest.approx(sum(map(bool, met)) / sum(met))


def logical(capacity: Capacity, counts) -> list[int]:
    rows = capacity.logical_rows(jnp.asarray(counts, jnp.int32))
    assert rows.dtype == jnp.int32
    return rows.tolist()


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.integers(1, 2**31 - 1), st.data())
def test_rows_on_device_are_the_exact_fraction(divisor, data):
    numerator = data.draw(st.integers(1, (INT32_LIMIT - 1) // divisor))
    # All counts whose exact result fits, up to the largest.
    largest = min(INT32_LIMIT - 1, (INT32_LIMIT - 1) * divisor // numerator)
    counts = [0, 1, largest, *data.draw(st.lists(st.integers(0, largest), min_size=20, max_size=20))]
    capacity = Capacity(numerator, divisor, INT32_LIMIT - 1)
    exact = [max(1, -(-Fraction(numerator, divisor) * count // 1)) for count in counts]
    assert logical(capacity, counts) == exact
    assert [capacity.static_rows(count) for count in counts] == exact


def test_rows_stop_at_what_can_occur():
    capacity = Capacity(23, 20, at_most=229)
    assert logical(capacity, [0, 1, 199, 200, 1000]) == [1, 2, 229, 229, 229]
    assert [capacity.static_rows(count) for count in (0, 200)] == [1, 229]


def test_pools_of_tokens_take_every_factor():
    """However many decimals it and the share of tokens that choose a shard have."""
    for shards, experts, choices, waves in itertools.product((1, 2, 8, 64), (64, 384, 512), (1, 2, 8, 10), (1, 3, 8)):
        shape = LayerShape(shards, experts, choices, 4096)
        for factor in (0.5, 1.03, 1.15, 1.3333, 1000.0):
            pool = token_pool(factor, shape, waves)
            wanted = min(1.0, factor * float(shape.visiting_share)) * 4096 / waves
            assert wanted <= pool.static_rows(4096) <= wanted * (1 + 1e-12) + 4096 / 1024 / waves + 1
            assert logical(pool, [4096]) == [pool.static_rows(4096)]


@hypothesis.settings(max_examples=40)
@hypothesis.given(DECIMAL_FACTORS, DECIMAL_FACTORS, SHAPES, st.integers(1, 5), st.data())
def test_every_capacity_is_the_oracles(sender, receiver, shape, waves, data):
    sizes = reference.Sizes(shape.num_shards, shape.tokens, shape.experts_per_token, shape.num_experts)
    policy = Policy(transport="pooled_wave", sender_factor=sender, receiver_factor=receiver, waves=waves)
    everybody = shape.num_shards * shape.tokens

    pool = sender_pool(sender, shape, waves)
    pool_rows = pool.static_rows(shape.tokens)
    assert pool_rows == reference.sender_pool(sizes, policy, shape.tokens)
    of_tokens = dataclasses.replace(policy, slots="token")
    tokens = token_pool(sender, shape, waves)
    assert tokens.static_rows(shape.tokens) == reference.sender_pool(sizes, of_tokens, shape.tokens)
    rows = expert_rows(receiver, shape, waves, pool_rows)
    assert rows.static_rows(everybody) == reference.expert_rows(sizes, policy, everybody)
    slots = cell(sender, shape, waves)
    assert slots.static_rows(shape.tokens) == reference.cell(sizes, policy, shape.tokens)
    assert slots.static_rows(shape.tokens) <= -(-shape.tokens // waves)
    in_wave = data.draw(st.integers(1, shape.local_experts))
    arrivals = destination_rows(receiver, shape, in_wave)
    assert arrivals.static_rows(everybody) == reference.destination_pool(sizes, policy, everybody, in_wave)

    # With fewer valid tokens: the oracle's rows, or what those tokens can fill at most (a factor is cut off there).
    for valid in data.draw(st.lists(st.integers(0, shape.tokens), min_size=3, max_size=3)):
        most = -(-valid * shape.most_per_destination // waves)
        assert logical(pool, [valid]) == [at_most(reference.sender_pool(sizes, policy, valid), most)]
        assert logical(tokens, [valid]) == [at_most(reference.sender_pool(sizes, of_tokens, valid), -(-valid // waves))]
        assert logical(slots, [valid]) == [at_most(reference.cell(sizes, policy, valid), -(-valid // waves))]
    for valid in data.draw(st.lists(st.integers(0, everybody), min_size=3, max_size=3)):
        assert logical(rows, [valid]) == [at_most(reference.expert_rows(sizes, policy, valid), valid)]
        most = valid * min(shape.experts_per_token, in_wave)
        assert logical(arrivals, [valid]) == [at_most(reference.destination_pool(sizes, policy, valid, in_wave), most)]


def at_most(rows: int, most: int) -> int:
    return max(1, min(rows, most))


# --- the documented rule, by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "count", "rows"), [(1.15, 200, 230), (1.1, 100, 110), (1.1, 101, 112)])
def test_factor_is_its_decimal_text(factor, count, rows):
    # One choice, two shards of many experts: P = factor * v / 2.
    shape = LayerShape(num_shards=2, num_experts=4, experts_per_token=1, tokens=2 * count)
    pool = sender_pool(factor, shape, waves=1)
    assert pool.static_rows(2 * count) == rows
    assert logical(pool, [2 * count]) == [rows]


def test_small_batches_keep_one_row():
    # 1.25 * 2 * 16 / 64 = 0.625 rows for each expert.
    shape = LayerShape(num_shards=1, num_experts=64, experts_per_token=2, tokens=16)
    rows = expert_rows(1.25, shape, waves=1, pool_rows=32)
    assert rows.static_rows(16) == 1
    assert logical(rows, [0, 1, 16]) == [1, 1, 1]
    settings = EPConfig(sender_factor=1000.0, receiver_factor=1.25)
    given = problem(ep_cases.uniform, sizes := Sizes(tokens=16, choices=2, experts=64))
    result = ep_cases.program(settings, mesh_of(1, 8, 1), sizes.sequence_length)(*given)
    ep_cases.check_answer(result, ep_cases.oracle(given, settings, 1, sizes.sequence_length))
    assert int(result[0][1][1].receiver) > 0


def test_rows_count_tokens_of_the_ep_group():
    # The same 128 tokens, K = 2, E = 8 on (8,1) and on (1,8): 1.15 * 2 * 16 / 8 and 1.15 * 2 * 128 / 8.
    alone = make_transport(EPConfig(), LayerShape(1, 8, 2, 16))
    together = make_transport(EPConfig(), LayerShape(8, 8, 2, 16))
    assert (alone.expert_rows, together.expert_rows) == (5, 37)
    assert (alone.pool_rows, together.pool_rows) == (32, 5)  # 1.15 * 2 * 16 is more than the 32 that exist; 4.6


# --- buffers of whole groups of rows ----------------------------------------------------------------------------------


def test_whole_rows():
    assert WHOLE_ROWS == ALIGNED_ROWS  # what the kernels ask for
    for buffers in (1, 2, 3, 6, 8, 12):
        for rows in range(1, 60):
            wanted = next(count for count in range(rows, rows + 9) if count * buffers % 8 == 0)
            assert whole_rows(rows, buffers) == wanted


@pytest.mark.parametrize("receive", ["expert", "pool"])
@pytest.mark.parametrize("slots", ["assignment", "token"])
@pytest.mark.parametrize("experts", [24, 48, 64])
def test_buffers_of_pooled_wave_fit_the_kernels(receive, slots, experts):
    """Rows of all local experts are a multiple of 8: what is accepted, and less than 8 more an expert, or a pool."""
    for tokens, receiver in itertools.product((25, 100, 333), (0.7, 1.03, 1.15, 50.0)):
        settings = EPConfig(slots=slots, receive=receive, receiver_factor=receiver, waves=2)
        transport = make_transport(settings, shape := LayerShape(8, experts, 3, tokens))
        accepted, spare = shape.local_experts * transport.expert_rows, 8 * shape.local_experts
        if receive == "pool":
            accepted, spare = min(accepted, 8 * transport.pool_rows * transport.per_slot), 8
        assert transport.held_rows % 8 == 0
        assert accepted <= transport.held_rows < accepted + spare


@pytest.mark.parametrize("transport", ["ragged", "rowwise", "ring"])
def test_buffers_of_agreed_transports_fit_the_kernels(transport):
    for tokens, receiver, waves in itertools.product((25, 100, 333), (0.7, 1.03, 50.0), (1, 3)):
        settings = EPConfig(transport=transport, receiver_factor=receiver, waves=1 if transport == "ring" else waves)
        receivers = make_transport(settings, LayerShape(8, 48, 3, tokens)).receivers
        for wave in range(receivers.waves):
            accepted = receivers.capacity(wave).static_rows(8 * tokens)
            assert receivers.rows(wave) % 8 == 0
            assert accepted <= receivers.rows(wave) < accepted + 8


# --- factors larger than anything can use -----------------------------------------------------------------------------


def test_needlessly_large_factors_change_nothing():
    sizes = Sizes(tokens=8, choices=2, experts=2)
    given = problem(ep_cases.uniform, sizes)
    steps = [
        ep_cases.program(EPConfig(sender_factor=f, receiver_factor=f), mesh_of(1, 4, 2), sizes.sequence_length)
        for f in (2.0, 4.0)
    ]
    ep_cases.check_same_bits(*[step(*given) for step in steps])


@pytest.mark.parametrize("factor", [2.0, 4.0, 16384.0, 1e30])
def test_buffers_never_exceed_the_worst_case(factor):
    shape = LayerShape(num_shards=2, num_experts=2, experts_per_token=2, tokens=8)
    settings = functools.partial(EPConfig, sender_factor=factor, receiver_factor=factor)
    pooled = make_transport(settings(), shape)
    assert (pooled.pool_rows, pooled.expert_rows) == (8, 16)
    ragged = make_transport(settings(transport="ragged"), shape)
    assert (ragged.sender_rows(), ragged.receivers.rows(0)) == (16, 16)
    assert make_transport(settings(transport="fixed_cell"), shape).cell_rows == 8
    for transport in ("rowwise", "ring"):
        assert make_transport(settings(transport=transport), shape).receivers.rows(0) == 16


def test_a_large_factor_drops_nothing_in_any_wave():
    # One local expert in each of 4 waves: all 64 tokens of the group may choose it, although a shard of 4 experts is
    # sent at most 3 of a token's choices. The bound per wave is not the bound per shard divided by the waves.
    shape = LayerShape(num_shards=4, num_experts=16, experts_per_token=3, tokens=16)
    transport = make_transport(EPConfig(transport="ragged", receiver_factor=1000.0, waves=4), shape)
    assert transport.receivers.rows(3) == 64
    assert logical(transport.receivers.capacity(3), [64, 10]) == [64, 10]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["pooled_wave", "fixed_cell", "ragged", "rowwise", "ring"])
def test_factors_that_overflow_are_refused(transport):
    # 1.1234567 is 11234567 / 10000000; K/S = 2/8 leaves a product far above 2^31.
    key = "sender_factor" if transport in ("pooled_wave", "fixed_cell") else "receiver_factor"
    settings = EPConfig(transport=transport, **{key: 1.1234567})
    with pytest.raises(ConfigError, match=rf"ep\.{key} = 1\.1234567: .* overflows int32; .* fewer decimals"):
        plan_buffers(make_transport(settings, LayerShape(8, 16, 2, 16)))


def plan_buffers(transport):
    for name in ("pool_rows", "cell_rows"):
        if hasattr(transport, name):
            return getattr(transport, name)
    return transport.receivers.rows(0)


def test_the_limit_of_overflow_is_exact():
    # One shard, one expert, one choice: the rate is 0.5 / waves = 1 / (2 * waves).
    shape = LayerShape(num_shards=1, num_experts=1, experts_per_token=1, tokens=10**6)
    with pytest.raises(ConfigError, match=f"fraction 1/{2**31} overflows"):
        sender_pool(0.5, shape, waves=2**30)
    assert logical(sender_pool(0.5, shape, waves=2**30 - 1), [10**6]) == [1]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_that_are_no_positive_number_are_refused(factor):
    for key in ("sender_factor", "receiver_factor"):
        with pytest.raises(ConfigError, match=f"ep.{key} = {factor!r}"):
            EPConfig(**{key: factor})


def test_dtype_of_production_sizes():
    """2^31 elements and more in one buffer: every index that is computed stays far below int32."""
    shape = LayerShape(num_shards=64, num_experts=512, experts_per_token=8, tokens=32768)
    pooled = make_transport(EPConfig(), shape)
    slots = pooled.pool_rows * shape.num_shards
    assert slots * 7168 > 2**31 > 100 * slots
    assert slots == 64 * 4711  # 1.15 * 8 * 32768 / 64 = 4710.4
    assert np.iinfo(np.int32).max > pooled.expert_rows * shape.local_experts
