"""Outcomes are what loops over the oracle's fates count: by stage, layer, expert, source, place, column and document.

Run: python -m pytest tests/replay/test_replay.py
"""

import collections

import numpy as np
import pytest

from ep_jax.ep import EPConfig
from ep_jax.ep.capacity import LayerShape
from ep_jax.fields import ConfigError
from ep_jax.replay import replay as module
from ep_jax.replay.policies import Family, families
from ep_jax.replay.replay import Request, replay
from ep_jax.replay.resharding import deal, groups, recorded_sizes
from tests.replay.replay_cases import CHOICES, EXPERTS, LAYERS, LENGTH, ROWS, SHARDS, make_step, oracle

SIZES = dict(num_experts=EXPERTS, sequence_length=LENGTH)
STEPS = [make_step(number) for number in (1, 2)]
FAMILIES = (
    Family(EPConfig(order="sequence", receive="pool"), SHARDS),
    Family(EPConfig(transport="ragged", premix=4), SHARDS),
)


def make_groups(shards=SHARDS):
    dealing = deal(STEPS[0].header, recorded_sizes(STEPS[0]), shards, "recorded", len(STEPS))
    return list(groups(dealing, STEPS))


def counted(family, sender, receiver):
    """Everything an Outcome holds, by loops over assignments; keys are (what, index...), values [valid, send, recv]."""
    found = collections.defaultdict(lambda: np.zeros(3))
    for number, group in enumerate(make_groups()):
        for layer in range(LAYERS):
            fate_STK = oracle(group, layer, family.at(sender, receiver))
            rows = np.zeros((2, EXPERTS))  # wanted, kept
            for (shard, token, choice), fate in np.ndenumerate(fate_STK):
                if fate == 3:
                    continue
                expert = int(group.expert_ids_NSTK[layer, shard, token, choice])
                one = np.array([1, fate == 1, fate == 2])
                weight = group.weights_NSTK[layer, shard, token, choice].astype(np.float64)
                g = family.premix
                sender_shard = shard // g * g + token % g if g > 1 else shard
                for key in (
                    ("group", number, layer),
                    ("expert", layer, expert),
                    ("source", shard),
                    ("place", token // LENGTH),
                    ("column", token % LENGTH),  # fewer columns than bins: a bin each
                    ("document", int(group.document_ST[shard, token])),
                ):
                    found[key] += one
                found["weight", layer] += one * weight
                found[("away",)] += one * (expert // (EXPERTS // SHARDS) != sender_shard)
                rows[:, expert] += (1, fate == 0)
            for name, rows_E in zip(("wanted", "kept"), rows, strict=True):
                by_shard = rows_E.reshape(SHARDS, -1).sum(axis=1)
                found[name, "shard", number, layer] = by_shard.max() / by_shard.mean()
                found[name, "expert", number, layer] = rows_E.max() / rows_E.mean()
    return found


def check(outcome, wanted):
    for number, layer in np.ndindex(outcome.counts_GNP.shape[:2]):
        assert outcome.counts_GNP[number, layer].tolist() == wanted["group", number, layer].tolist()
        at = (number, layer)
        assert outcome.shard_imbalance_GN[at] == pytest.approx(wanted["kept", "shard", *at])
        assert outcome.expert_imbalance_GN[at] == pytest.approx(wanted["kept", "expert", *at])
        assert outcome.wanted_shard_imbalance_GN[at] == pytest.approx(wanted["wanted", "shard", *at])
        assert outcome.wanted_expert_imbalance_GN[at] == pytest.approx(wanted["wanted", "expert", *at])
    for layer, expert in np.ndindex(LAYERS, EXPERTS):
        assert outcome.expert_NPE[layer, :, expert].tolist() == wanted["expert", layer, expert].tolist()
    for name, counts_PX, size in (
        ("source", outcome.source_PS, SHARDS),
        ("place", outcome.place_PR, ROWS),
        ("column", outcome.column_PC, LENGTH),
    ):
        assert counts_PX.shape == (3, size)
        assert counts_PX.T.tolist() == [wanted[name, index].tolist() for index in range(size)]
    documents = sorted(key[1] for key in wanted if key[0] == "document")
    assert outcome.documents_D.tolist() == documents
    assert outcome.document_PD.T.tolist() == [wanted["document", number].tolist() for number in documents]
    np.testing.assert_allclose(outcome.weight_NP, [wanted["weight", layer] for layer in range(LAYERS)], rtol=1e-6)
    assert outcome.away_P.tolist() == wanted[("away",)].tolist()
    valid, *dropped = outcome.away_P.tolist()
    assert outcome.kept_away == valid - sum(dropped)


@pytest.mark.parametrize("one_sender_at_a_time", [False, True])
def test_outcomes_are_counted_by_loops(monkeypatch, one_sender_at_a_time):
    if one_sender_at_a_time:
        monkeypatch.setattr(module, "MOST_FATES_BYTES", 1)
    requests = [Request.grid(family, (0.8, 1.2), (0.9, 1.3)) for family in FAMILIES]
    assert [len(request.pairs) for request in requests] == [4, 2]  # ragged has no sender factor
    outcomes = replay(iter(make_groups()), requests, **SIZES)
    for request, of_request in zip(requests, outcomes, strict=True):
        for (sender, receiver), outcome in zip(request.pairs, of_request, strict=True):
            assert (outcome.sender, outcome.receiver, outcome.family) == (sender, receiver, request.family)
            check(outcome, counted(request.family, sender, receiver))
            assert outcome.steps_G.tolist() == [0, 0, 1, 1]
            assert outcome.total_P[1:].sum() > 0


def test_what_is_derived():
    [[outcome]] = replay(make_groups(), [Request.grid(FAMILIES[0], (1.0,), (1.0,))], **SIZES)
    weights = counted(FAMILIES[0], 1.0, 1.0)
    lost = sum(weights["weight", layer] for layer in range(LAYERS))
    np.testing.assert_allclose(outcome.lost_weight_2, lost[1:] / lost[0], rtol=1e-6)
    assert outcome.settings == FAMILIES[0].at(1.0, 1.0)
    assert outcome.total_P[0] == sum(step.num_assignments for step in STEPS)


def test_pairs_are_each_once_and_unused_factors_left_out():
    pairs = [(1.0, 1.0), (1.2, 1.1), (1.0, 1.0), (1.2, 1.3)]
    assert Request.of_pairs(FAMILIES[0], pairs).pairs == [(1.0, 1.0), (1.2, 1.1), (1.2, 1.3)]
    assert Request.of_pairs(FAMILIES[1], pairs).pairs == [(1.0, 1.0), (1.0, 1.1), (1.0, 1.3)]
    cells = Family(EPConfig(transport="fixed_cell"), SHARDS)
    assert Request.of_pairs(cells, pairs).pairs == [(1.0, 1.0), (1.2, 1.0)]


def test_families_are_all_combinations_once():
    base = EPConfig(order="choice", agreed="tail", waves=2)
    found = families(["pooled_wave", "ring"], [4, 8], dict(receive=["expert", "pool"], premix=[1, 2]), base)
    names = [(family.shards, family.name) for family in found]
    pooled = [
        "choice expert, 2 waves",
        "choice expert, 2 waves, pre-mix 2",
        "choice pool, 2 waves",
        "choice pool, 2 waves, pre-mix 2",
    ]
    expected = [f"pooled_wave {rest}" for rest in pooled] + ["ring tail", "ring tail pre-mix 2"]
    assert [name.replace(",", "") for _, name in names] == [name.replace(",", "") for name in expected * 2]
    assert [shards for shards, _ in names] == [4] * 6 + [8] * 6
    assert len(families(["ring", "ring"], [4, 4], dict(order=["weight"]), base)) == 1
    with pytest.raises(
        ConfigError, match="--policies dense: allowed are pooled_wave, fixed_cell, ragged, rowwise, ring"
    ):
        families(["dense"], [4], {}, base)
    with pytest.raises(ConfigError, match="--premix 3: must divide 8 shards and a shard's 16 tokens"):
        Family(EPConfig(premix=3), 8).check(LayerShape(8, 16, CHOICES, 16))
