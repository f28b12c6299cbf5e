"""Many factors at once keep exactly what the oracle, and what `simulate`, keep at each of them.

Run: python -m pytest tests/replay/test_factors.py
"""

import numpy as np
import pytest

from ep_jax.ep import EPConfig
from ep_jax.ep.simulate import simulate
from ep_jax.fields import ConfigError
from ep_jax.replay import factors
from ep_jax.replay.factors import count_factors, simulate_factors
from ep_jax.replay.policies import Family
from tests.replay.replay_cases import EXPERTS, LENGTH, make_group, oracle

SENDERS = (0.7, 1.0, 1.37, 2.5)
RECEIVERS = ((0.6, 1.0, 3.0), (0.8, 1.1, 2.0), (0.5, 1.25, 1.5), (0.9, 1.0, 1.1))  # others for every sender factor
POLICIES = (
    dict(transport="pooled_wave", order="position"),
    dict(transport="pooled_wave", order="weight", receive="pool", waves=3, premix=2),
    dict(transport="pooled_wave", slots="token", order="choice", receive="pool", waves=2),
    dict(transport="fixed_cell", order="choice", waves=2),
    dict(transport="ragged", agreed="round_robin", waves=2),
    dict(transport="ring", agreed="water_fill", premix=4),
    dict(transport="dense"),
)
SIZES = dict(num_experts=EXPERTS, sequence_length=LENGTH)


def arrays_of(group, layer=0):
    """uint8 ids, as in a trace. The valid tokens of shards differ, so limits do."""
    return group.expert_ids_NSTK[layer], group.weights_NSTK[layer], group.valid_ST


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: "-".join(str(value) for value in policy.values()))
def test_every_factor_is_the_oracles(policy):
    family = Family(EPConfig(**policy), 8)
    largest = family.at(2.5, 3.0)
    seen = set()
    for number in (1, 2):
        group = make_group(number)
        given = dict(settings=largest, senders=SENDERS, receivers=RECEIVERS)
        fates = np.asarray(simulate_factors(*arrays_of(group), **SIZES, **given))
        counts = np.asarray(count_factors(*arrays_of(group), **SIZES, **given))
        assert fates.dtype == np.int8
        for i, sender in enumerate(SENDERS):
            for j, receiver in enumerate(RECEIVERS[i]):
                wanted = oracle(group, 0, family.at(sender, receiver))
                np.testing.assert_array_equal(fates[i, j], wanted, f"{sender} {receiver}")
                assert counts[i, j].tolist() == [(wanted == 1).sum(), (wanted == 2).sum()]
                seen |= set(np.unique(wanted).tolist())
    drops = {stage for stage, factor in ((1, "sender_factor"), (2, "receiver_factor")) if factor in largest.used}
    assert seen == {0, 3} | drops  # every stage was put to the test


def test_it_is_simulate():
    group = make_group(3)
    family = Family(EPConfig(waves=2), 8)
    fates = simulate_factors(
        *arrays_of(group), **SIZES, settings=family.at(1.5, 1.5), senders=(1.0, 1.5), receivers=[(1.1,), (1.5,)]
    )
    ids, weights, valid = arrays_of(group)
    for fate, pair in zip(fates[:, 0], ((1.0, 1.1), (1.5, 1.5)), strict=True):
        plain = simulate(ids.astype(np.int32), weights, valid, **SIZES, settings=family.at(*pair))
        np.testing.assert_array_equal(fate, plain)


def test_no_factor_compiles():
    group, settings = make_group(), Family(EPConfig(transport="fixed_cell"), 8).at(3.0, 1.0)
    sizes = []
    for senders in ((1.0, 2.0), (1.3, 2.9), (0.1, 3.0)):
        count_factors(*arrays_of(group), **SIZES, settings=settings, senders=senders, receivers=[(1.0,)] * 2)
        sizes.append(factors._for_all._cache_size())
    assert sizes[0] == sizes[1] == sizes[2]


def test_refuses_what_buffers_do_not_hold():
    settings = Family(EPConfig(), 8).at(1.5, 1.5)
    for senders, receivers in (((1.6,), [(1.0,)]), ((1.0,), [(1.0, 1.6)])):
        with pytest.raises(ValueError, match="buffers are sized for"):
            simulate_factors(*arrays_of(make_group()), **SIZES, settings=settings, senders=senders, receivers=receivers)
    with pytest.raises(ConfigError, match="fewer decimals"):
        count_factors(*arrays_of(make_group()), **SIZES, settings=settings, senders=(1.000000001,), receivers=[(1.0,)])
