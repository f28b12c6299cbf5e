"""Synthetic routing: each kind is skewed as labelled, and document skew drops what published toy studies drop.

Run: python -m pytest tests/traces/test_synthetic.py
"""

import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.ep import EPConfig
from ep_jax.ep.simulate import simulate
from ep_jax.fields import ConfigError
from ep_jax.traces.synthetic import KINDS, balance, chosen_probability, generate

SMALL = dict(
    shards=4, rows_per_shard=4, sequence_length=32, num_experts=16, experts_per_token=4, num_layers=2, steps=2, seed=5
)  # fmt: skip


def counts_of(step) -> np.ndarray:
    """Valid assignments [N,S,E], by loops."""
    layers, _, shards, tokens, _ = step.expert_ids_NMSTK.shape
    counts_NSE = np.zeros((layers, shards, step.header.num_experts), int)
    for layer in range(layers):
        for shard in range(shards):
            for token in range(tokens):
                if step.valid_MST[0, shard, token]:
                    counts_NSE[layer, shard, step.expert_ids_NMSTK[layer, 0, shard, token]] += 1
    return counts_NSE


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_whole_and_repeatable(kind):
    steps = list(generate(kind, **SMALL, padding_fraction=0.25))
    assert [step.step for step in steps] == [1, 2]
    strength = " sigma 1.47" if "skew" in kind else ""
    assert steps[0].header.source == f"synthetic {kind}{strength} seed 5"
    for step, again in zip(steps, generate(kind, **SMALL, padding_fraction=0.25), strict=True):
        assert step.expert_ids_NMSTK.shape == (2, 1, 4, 128, 4)
        assert step.expert_ids_NMSTK.max() < 16
        assert (np.diff(np.sort(step.expert_ids_NMSTK.astype(int), axis=-1), axis=-1) > 0).all()
        np.testing.assert_allclose(step.weights_NMSTK.sum(axis=-1), 1, rtol=1e-6)
        assert (np.diff(step.weights_NMSTK, axis=-1) <= 0).all()  # the best choice first
        np.testing.assert_array_equal(step.valid_MST[0, 0], np.tile(np.arange(32) < 24, 4))
        np.testing.assert_array_equal(step.expert_ids_NMSTK, again.expert_ids_NMSTK)
        np.testing.assert_array_equal(step.weights_NMSTK, again.weights_NMSTK)
    if kind != "balanced":
        assert (steps[0].expert_ids_NMSTK[0] != steps[0].expert_ids_NMSTK[1]).any()
        assert (steps[0].expert_ids_NMSTK != steps[1].expert_ids_NMSTK).any()
        [other, _] = generate(kind, **SMALL | {"seed": 6}, padding_fraction=0.25)
        assert (steps[0].expert_ids_NMSTK != other.expert_ids_NMSTK).any()


@pytest.mark.parametrize("documents", [1, 3, 4, 7])
def test_documents_fill_a_shard_in_order(documents):
    """Equally long up to a token, over rows and around padding; numbered anew in every shard and step."""
    seen = set()
    for step in generate("uniform", **SMALL, documents_per_shard=documents, padding_fraction=0.1):
        for valid_T, document_T, position_T in zip(
            step.valid_MST[0], step.document_MST[0], step.position_MST[0], strict=True
        ):
            assert (document_T[~valid_T] == -1).all()
            assert (position_T[~valid_T] == -1).all()
            names, lengths = np.unique(document_T[valid_T], return_counts=True)
            assert len(names) == documents
            assert lengths.max() - lengths.min() <= 1
            assert document_T[valid_T].tolist() == np.repeat(names, lengths).tolist()
            assert position_T[valid_T].tolist() == [i for length in lengths for i in range(length)]
            assert not seen & set(names)
            seen |= set(names)
    assert len(seen) == 2 * 4 * documents


def test_balanced_is_exact():
    for padding in (0.0, 0.25):
        [step, _] = generate("balanced", **SMALL, padding_fraction=padding)
        counts_NSE = counts_of(step)
        assert (counts_NSE == counts_NSE[0, 0, 0]).all()
    [step, _] = generate("balanced", **SMALL)
    assert step.expert_ids_NMSTK[1, 0, 2, :5].reshape(-1).tolist() == [*range(16), 0, 1, 2, 3]


def test_uniform_is_noise_alone():
    [step] = generate("uniform", **SMALL | {"steps": 1, "rows_per_shard": 64})
    counts_NSE = counts_of(step)
    mean = 64 * 32 * 4 / 16
    # Without replacement: a token takes an expert or not, with probability K/E.
    assert 0.6 < ((counts_NSE - mean) ** 2).mean() / (mean * (1 - 4 / 16)) < 1.4


def test_global_skew_is_the_same_everywhere():
    steps = list(generate("global_skew", **SMALL | {"rows_per_shard": 64}, sigma=1.0))
    shares = np.array([counts_of(step) for step in steps]) / (64 * 32)  # [step, layer, shard, expert]
    np.testing.assert_allclose(shares, np.broadcast_to(shares[:1, :, :1], shares.shape), atol=0.06)
    assert shares[0, 0].max(axis=-1).min() > 1.5 * 4 / 16
    # As many tokens as a race at the drawn rates predicts.
    logits_1E = np.random.default_rng([5, 0, 1]).standard_normal((1, 16))
    predicted_E = chosen_probability(logits_1E, 4)[0]
    np.testing.assert_allclose(shares[:, 1].mean(axis=(0, 1)), predicted_E, atol=0.03)


def test_chosen_probability_is_that_of_gumbel_top_k():
    rng = np.random.default_rng(0)
    logits_GE = 1.5 * rng.standard_normal((3, 12))
    scores = logits_GE[:, None] + rng.gumbel(size=(3, 40_000, 12))
    chosen = np.argsort(-scores, axis=-1)[..., :4]
    counted_GE = np.array([np.bincount(ids.reshape(-1), minlength=12) for ids in chosen]) / 40_000
    np.testing.assert_allclose(chosen_probability(logits_GE, 4), counted_GE, atol=0.03)
    np.testing.assert_allclose(chosen_probability(logits_GE, 4).sum(axis=1), 4, rtol=1e-5)


@pytest.mark.parametrize("sigma", [0.0, 1.47, 5.0])
@pytest.mark.parametrize(("documents", "experts", "choices"), [(64, 16, 2), (256, 96, 8), (8, 8, 6)])
def test_balance_evens_out_the_load(sigma, documents, experts, choices):
    logits_GE = sigma * np.random.default_rng(1).standard_normal((documents, experts))
    load_E = chosen_probability(balance(logits_GE, choices), choices).mean(axis=0)
    np.testing.assert_allclose(load_E, choices / experts, rtol=2e-3)


@pytest.mark.parametrize(
    ("documents", "published"),
    [
        (16, {1.0: 8.4, 1.05: 6.3, 1.1: 4.6, 1.15: 3.3, 1.2: 2.3, 1.33: 0.86, 1.5: 0.2}),
        (64, {1.05: 2.4, 1.15: 0.5}),
    ],
)
def test_published_sender_drops_of_long_documents(documents, published):
    """64 shards, 384 experts, top-8; documents so long that counts have no noise: what is above factor * mean drops."""
    logits_GE = balance(1.47 * np.random.default_rng(0).standard_normal((64 * documents, 384)), 8)
    load_SD = chosen_probability(logits_GE, 8).reshape(64, documents, 64, 6).sum(axis=(1, 3)) / documents * 64 / 8
    for factor, percent in published.items():
        assert 100 * np.maximum(load_SD - factor, 0).mean() == pytest.approx(percent, abs=0.4)


@pytest.fixture(scope="module")
def production():
    """The published shape with documents of 64 tokens, so that counts carry more noise than the published study's."""
    [step] = generate(
        "document_skew", shards=64, rows_per_shard=16, sequence_length=64, num_experts=384, experts_per_token=8
    )
    return step


def fates(step, **policy) -> np.ndarray:
    arrays = (step.expert_ids_NMSTK[0, 0].astype(np.int32), step.weights_NMSTK[0, 0], step.valid_MST[0])
    settings = EPConfig(**{"sender_factor": 1.15, "receiver_factor": 1.15} | policy)
    return np.asarray(
        simulate(
            *map(jnp.asarray, arrays),
            num_experts=step.header.num_experts,
            sequence_length=step.header.sequence_length,
            settings=settings,
        )
    )


def test_published_drops_token_by_token(production):
    """Sender drops of 3.3-3.5 % plus noise and none at receivers; in sequence order the last documents pay."""
    fate_STK = fates(production, order="sequence")
    assert 0.033 < (fate_STK == 1).mean() < 0.042
    assert (fate_STK == 2).mean() < 1e-5
    by_document = (fate_STK == 1).reshape(64, 16, -1).mean(axis=(0, 2))
    assert by_document[:7].max() < 0.005
    np.testing.assert_allclose(by_document[-3:], [0.085, 0.14, 0.20], atol=0.035)
    # The same pools in order of position: the same number of drops, all documents alike.
    fair_STK = fates(production, order="position")
    assert (fair_STK == 1).sum() == (fate_STK == 1).sum()
    fair = (fair_STK == 1).reshape(64, 16, -1).mean(axis=(0, 2))
    assert fair.max() < 1.25 * fair.min()


def test_experts_are_balanced_over_documents_but_not_within(production):
    ids_STK = production.expert_ids_NMSTK[0, 0]
    mean = ids_STK.size / 384
    expert_E = np.bincount(ids_STK.reshape(-1), minlength=384)
    assert abs(expert_E / mean - 1).max() < 5 / np.sqrt(mean)  # noise of so few tokens is 4 % itself
    one_document_E = np.bincount(ids_STK[0, :64].reshape(-1), minlength=384)
    assert one_document_E.max() > 10 * one_document_E.mean()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "skew"}, "kind = 'skew': allowed is one of balanced, uniform, global_skew, document_skew"),
        ({"shards": 0}, "shards = 0: allowed is at least 1"),
        ({"steps": 0}, "steps = 0: allowed is at least 1"),
        ({"documents_per_shard": 0}, "documents_per_shard = 0: allowed is at least 1"),
        ({"documents_per_shard": 129}, "documents_per_shard = 129: allowed is at most 128, the valid tokens"),
        ({"experts_per_token": 16}, "experts_per_token = 16: allowed is 1 to 15"),
        ({"num_experts": 1}, "num_experts = 1: allowed is 2 to 65536"),
        ({"sigma": float("nan")}, "sigma = nan: allowed is 0 to 5"),
        ({"seed": -1}, "seed = -1: allowed is at least 0"),
        ({"padding_fraction": 1.0}, "padding_fraction = 1.0: allowed is 0 to below 1"),
        ({"padding_fraction": -0.1}, "padding_fraction = -0.1: allowed is 0 to below 1"),
        ({"kind": "balanced", "num_experts": 15}, "num_experts = 15: allowed is with balanced, a divisor of 512, the"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        generate(**{"kind": "uniform"} | SMALL | change)  # before a step is asked for
