"""Recommended factors: the cheapest that are good enough, found by searching as by trying everything.

Run: python -m pytest tests/replay/test_recommend.py
"""

import numpy as np
import pytest

from ep_jax.ep import EPConfig
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.traffic import Widths, traffic
from ep_jax.replay import search as module
from ep_jax.replay.cost import expert_rows, forward_bytes, price_bytes
from ep_jax.replay.policies import Family
from ep_jax.replay.recommend import Candidates, by_step, choose, draw_steps, interval
from ep_jax.replay.resharding import deal, groups, recorded_sizes
from ep_jax.replay.search import ALL, Problem, search
from ep_jax.replay.study import Question, study_grid, study_search
from tests.replay.replay_cases import CHOICES, LENGTH, make_step, oracle

WIDTHS = Widths(64, 0, 2)
STEPS = [make_step(number, skew=0.7) for number in range(1, 7)]


def make_question(target, shards=8):
    dealing = deal(STEPS[0].header, recorded_sizes(STEPS[0]), shards, "recorded", len(STEPS))
    return Question(lambda: iter(STEPS), dealing, WIDTHS, target)


def silent(text):
    assert "\n" not in text


# --- confidence -------------------------------------------------------------------------------------------------------


def test_interval_draws_steps_again():
    rng = np.random.default_rng(0)
    drops_UX, valid_U = rng.integers(0, 50, (30, 2)), rng.integers(100, 200, 30)
    found = interval(drops_UX, valid_U, draw_steps(30, seed=1, samples=20_000))
    np.testing.assert_allclose(found.rate, drops_UX.sum(axis=0) / valid_U.sum())
    rates = []  # another generator, step by step
    for _ in range(20_000):
        drawn = rng.integers(0, 30, 30)
        rates.append(drops_UX[drawn].sum(axis=0) / valid_U[drawn].sum())
    wanted = np.quantile(rates, [0.025, 0.975], axis=0)
    np.testing.assert_allclose([found.low, found.high], wanted, rtol=0.02)


def test_the_draw_is_seeded_and_whole():
    first, again, other = draw_steps(7, 3), draw_steps(7, 3), draw_steps(7, 4)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first.sum(axis=1) == 7).all()


def test_one_step_has_no_interval():
    found = interval(np.array([[3]]), np.array([12]), draw_steps(1, 0))
    assert found.low == found.high == found.rate == [0.25]


def test_groups_of_a_step_are_one_unit():
    sums = by_step(np.array([[1, 2], [10, 20], [100, 200], [5, 6]]), np.array([0, 0, 2, 7]))
    assert sums.tolist() == [[11, 22], [100, 200], [5, 6]]


def test_choose_takes_the_cheapest_whose_upper_end_is_below():
    """Candidate 0 is cheapest and below the target on average only; 1 and 2 cost the same, 2 drops less."""
    drops_UX = np.array([[0, 1, 0, 0], [18, 1, 1, 0]])
    candidates = Candidates(np.array([1.0, 1.1, 1.2, 1.3]), np.ones(4), np.array([1.0, 2.0, 2.0, 3.0]), drops_UX)
    valid_U, drawn_BU = np.array([100, 100]), draw_steps(2, 0)
    choice = choose(candidates, valid_U, drawn_BU, target=0.1)
    assert (choice.sender, choice.price, choice.interval.rate) == (1.2, 2.0, 0.005)
    assert choose(candidates, valid_U, drawn_BU, target=0.2).sender == 1.0
    assert choose(candidates, valid_U, drawn_BU, target=0.0).sender == 1.3
    assert choose(only(candidates, slice(3)), valid_U, drawn_BU, target=0.0) is None


def only(candidates, some):
    """Some of the candidates."""
    arrays = (candidates.senders_X, candidates.receivers_X, candidates.prices_X, candidates.drops_UX)
    return Candidates(*[array[..., some] for array in arrays])


# --- cost -------------------------------------------------------------------------------------------------------------

SHAPE = LayerShape(num_shards=8, num_experts=16, experts_per_token=CHOICES, tokens=32)


@pytest.mark.parametrize("transport", ["pooled_wave", "fixed_cell", "ring"])
def test_buffers_cost_what_traffic_says(transport):
    settings = EPConfig(transport=transport, premix=2)
    assert forward_bytes(settings, SHAPE, WIDTHS, 123.0) == traffic(settings, SHAPE, WIDTHS).forward_bytes


@pytest.mark.parametrize(("transport", "told"), [("ragged", 16), ("rowwise", 16 + 2 * 32 * CHOICES)])
def test_true_rows_cost_what_is_kept(transport, told):
    """Counts (rowwise: routes too) to 7 others, 10.5 rows there and back; a pre-mix group of 2 sends half its rows."""
    plain, mixed = EPConfig(transport=transport), EPConfig(transport=transport, premix=2)
    rows = 2 * 10.5 * 128
    assert forward_bytes(plain, SHAPE, WIDTHS, 10.5) == 7 * told * 4 + rows
    swaps = 2 * 32 * 128 // 2 + 32 * 2 * CHOICES * 4 // 2 + 32 * CHOICES // 2
    assert forward_bytes(mixed, SHAPE, WIDTHS, 10.5) == 7 * told * 4 + rows + swaps


def test_expert_rows():
    """24 balanced rows a destination and pool, 12 an expert; 32 x 3 assignments a shard."""
    assert expert_rows(EPConfig(sender_factor=1.5, receiver_factor=1.25), SHAPE) == 2 * 60
    assert expert_rows(EPConfig(receive="pool", sender_factor=0.5, receiver_factor=1.25), SHAPE) == 8 * 6
    assert expert_rows(EPConfig(transport="fixed_cell", sender_factor=1.5, waves=3), SHAPE) == 3 * 16 * 3
    ragged = EPConfig(transport="ragged", receiver_factor=1.25, waves=2)
    assert expert_rows(ragged, SHAPE) == 2 * 64  # 60, in whole groups of 8
    settings = EPConfig(transport="ragged", receiver_factor=1.25)
    assert price_bytes(settings, SHAPE, WIDTHS) == traffic(settings, SHAPE, WIDTHS).forward_bytes + 120 * 128


# --- search -----------------------------------------------------------------------------------------------------------


def rates_by_oracle(family, sender, receiver):
    """[U,N] drops and [U] valid assignments of a layer."""
    dealing = make_question(0.1).dealing
    drops_UN, valid_U = np.zeros((len(STEPS), 2), int), np.zeros(len(STEPS), int)
    for group in groups(dealing, STEPS):
        valid_U[group.step] += group.valid_ST.sum() * CHOICES
        for layer in range(2):
            drops_UN[group.step, layer] += np.isin(oracle(group, layer, family.at(sender, receiver)), (1, 2)).sum()
    return drops_UN, valid_U


def test_search_finds_the_cheapest_of_all(monkeypatch):
    """On a small grid without a closer look, by trying every pair with the oracle, for all layers and for each."""
    monkeypatch.setattr(module, "SENDERS", (1.0, 1.3, 1.6, 1.9, 2.2, 2.5))
    monkeypatch.setattr(module, "RECEIVERS", (1.0, 1.2, 1.5, 2.0))
    monkeypatch.setattr(module, "SENDERS_AT_ONCE", 2)
    monkeypatch.setattr(module, "CLOSER_PASSES", 0)
    family, question = Family(EPConfig(), 8), make_question(0.08)
    problem = Problem(family, question.groups, 2, question.shape, LENGTH, WIDTHS, 0.08, 0)
    found = search(problem, silent)
    drawn_BU = draw_steps(len(STEPS), 0)
    best = {}
    for sender in module.SENDERS:
        for receiver in module.RECEIVERS:
            drops_UN, valid_U = rates_by_oracle(family, sender, receiver)
            layers = [(layer, drops_UN[:, layer], valid_U) for layer in (0, 1)]
            for scope, drops_U, valid in ((ALL, drops_UN.sum(axis=1), 2 * valid_U), *layers):
                of_pair = interval(drops_U[:, None], valid, drawn_BU)
                if of_pair.high[0] <= 0.08:
                    key = (problem.price(sender, receiver), of_pair.rate[0], sender, receiver)
                    best[scope] = min(best.get(scope, key), key)
    assert set(best) == set(found.choices) == {ALL, 0, 1}
    for scope, (price, rate, sender, receiver) in best.items():
        choice = found.choices[scope]
        assert (choice.price, choice.sender, choice.receiver) == (price, sender, receiver)
        assert choice.interval.rate == rate
    np.testing.assert_array_equal(found.valid_U, 2 * rates_by_oracle(family, 1.0, 1.0)[1])
    assert found.candidates[ALL].senders_X.max() < module.SENDERS[-1]  # it stopped where nothing could be cheaper


@pytest.mark.parametrize("transport", ["pooled_wave", "ragged"])
def test_a_closer_look_is_never_worse_and_to_a_hundredth(transport):
    question = make_question(0.05)
    [study] = study_search(question, [Family(EPConfig(transport=transport), 8)], EPConfig(), silent)
    choice, tried = study.choices[ALL], study.candidates
    coarse = np.isin(tried.receivers_X, module.RECEIVERS) & np.isin(tried.senders_X, (*module.SENDERS, 1.0))
    rough = choose(only(tried, coarse), study.valid_U, draw_steps(len(STEPS), 0), 0.05)
    assert (choice.price, choice.interval.rate) < (rough.price, rough.interval.rate)
    assert choice.interval.high <= 0.05
    result = study.recommended
    assert (result.outcome.sender, result.outcome.receiver) == (choice.sender, choice.receiver)
    assert result.interval == choice.interval  # replayed in full, it drops what the search counted
    factor = choice.sender if transport == "pooled_wave" else choice.receiver
    near = np.unique(tried.senders_X if transport == "pooled_wave" else tried.receivers_X)
    assert (factor - near[near < factor].max()) < 0.03


def test_a_target_that_nothing_meets(monkeypatch):
    monkeypatch.setattr(module, "SENDERS", (0.5, 0.6))
    monkeypatch.setattr(module, "RECEIVERS", (0.5, 0.6))
    [study] = study_search(make_question(0.01), [Family(EPConfig(), 8)], EPConfig(), silent)
    assert study.recommended is None
    assert set(study.choices.values()) == {None}


def test_a_grid_chooses_among_its_pairs():
    family, question = Family(EPConfig(), 8), make_question(0.08)
    [study] = study_grid(question, [family], (1.0, 1.6, 2.2), (1.2, 1.5))
    assert len(study.results) == 6
    for result in study.results:
        drops_UN, valid_U = rates_by_oracle(family, result.outcome.sender, result.outcome.receiver)
        wanted = interval(drops_UN, valid_U, draw_steps(len(STEPS), 0))
        np.testing.assert_array_equal(result.layer_interval, wanted)
        assert result.interval.rate == drops_UN.sum() / (2 * valid_U.sum())
    good = [r for r in study.results if r.interval.high <= 0.08]
    assert study.recommended in good
    assert all(study.choices[ALL].price <= price_bytes(r.outcome.settings, question.shape, WIDTHS) for r in good)
    assert set(study.choices) == {ALL, 0, 1}
