"""The bigram baseline against a table worked out in plain Python."""

import collections
import math

import numpy as np
import pytest

from ep_jax.data import bigram, bigram_cross_entropy

BOS, EOS, VOCAB = 256, 257, 259


def plain_cross_entropy(train, held_out):
    pairs, inputs, targets = collections.Counter(), collections.Counter(), collections.Counter()
    for document in train:
        for x, y in zip([BOS, *document], [*document, EOS], strict=True):
            pairs[x, y] += 1
            inputs[x] += 1
            targets[y] += 1
    total, count = 0.0, 0
    for document in held_out:
        for x, y in zip([BOS, *document], [*document, EOS], strict=True):
            unigram = (targets[y] + 1) / (targets.total() + VOCAB)
            total -= math.log((pairs[x, y] + unigram) / (inputs[x] + 1))
            count += 1
    return total / count


@pytest.mark.parametrize("chunk_tokens", [1, 100, 1 << 20])
def test_equals_plain_counting_whatever_the_chunks(make_sequences, monkeypatch, chunk_tokens):
    monkeypatch.setattr(bigram, "CHUNK_TOKENS", chunk_tokens)
    rng = np.random.default_rng(0)
    train = [rng.integers(0, 12, rng.integers(1, 50)).tolist() for _ in range(20)]
    held_out = [rng.integers(0, 14, rng.integers(1, 50)).tolist() for _ in range(5)]  # two tokens never seen
    found = bigram_cross_entropy(make_sequences(train, 8), make_sequences(held_out, 8))
    assert found == pytest.approx(plain_cross_entropy(train, held_out), rel=1e-12)


def test_a_certain_successor_costs_almost_nothing(make_sequences):
    alternating = [[1, 2] * 5000]
    assert bigram_cross_entropy(make_sequences(alternating, 64), make_sequences(alternating, 64)) < 0.01
    uniform = [np.random.default_rng(0).integers(0, 8, 50_000).tolist()]
    assert bigram_cross_entropy(make_sequences(uniform, 64), make_sequences(uniform, 64)) == pytest.approx(
        math.log(8), abs=0.01
    )
