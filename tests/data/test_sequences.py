"""Rows as arrays: each token once, in order, documents apart; and the order of rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_jax.data.sequences import rows_at
from ep_jax.fields import ConfigError

BOS, EOS, PAD = 256, 257, 258
documents_lists = st.lists(st.lists(st.integers(0, 258), min_size=1, max_size=40), min_size=1, max_size=12)


@given(documents_lists, st.integers(2, 16))
def test_every_token_is_an_input_once_in_order_with_its_successor_as_target(make_sequences, documents, length):
    """Ids include those of BOS, EOS and padding, so nothing may be concluded from an id."""
    sequences = make_sequences(documents, length)
    batch = sequences.batch(np.arange(sequences.num_rows))
    pieces = {number: [] for number in range(len(documents))}
    for row in range(sequences.num_rows):
        valid, segments = batch.valid[row], batch.segments[row]
        filled = int(valid.sum())
        assert valid[:filled].all()  # padding only at row ends
        assert (segments[filled:] == 0).all()
        assert (batch.tokens[row, filled:] == PAD).all()
        assert (batch.targets[row, filled:] == PAD).all()
        assert (batch.positions[row, filled:] == 0).all()
        first, last = sequences.packing.row_starts[row : row + 2]
        assert np.unique(segments[:filled]).tolist() == list(range(1, last - first + 1))
        assert (np.diff(segments[:filled]) >= 0).all()  # contiguous
        for segment, piece in enumerate(range(first, last), start=1):
            here = segments == segment
            assert batch.positions[row, here].tolist() == list(range(here.sum()))
            tokens, targets = batch.tokens[row, here].tolist(), batch.targets[row, here].tolist()
            pieces[int(sequences.packing.document[piece])].append((sequences.packing.start[piece], tokens, targets))
    for number, document in enumerate(documents):
        found = sorted(pieces[number])
        inputs = [token for _, tokens, _ in found for token in tokens]
        targets = [token for _, _, targets in found for token in targets]
        assert inputs == [BOS, *document]
        assert targets == [*document, EOS]


def test_a_real_token_with_the_pad_id_is_valid(make_sequences):
    """BL-12: validity comes from the mask, never from the id."""
    batch = make_sequences([[PAD, PAD, 1]], 8).batch(np.array([0]))
    assert batch.tokens.tolist() == [[BOS, PAD, PAD, 1, PAD, PAD, PAD, PAD]]
    assert batch.valid.tolist() == [[True] * 4 + [False] * 4]


def test_row_minus_one_is_padding_and_rows_outside_are_refused(make_sequences):
    sequences = make_sequences([[1, 2, 3]], 8)
    batch = sequences.batch(np.array([-1, 0]))
    assert batch.valid.sum(axis=1).tolist() == [0, 4]
    assert batch.segments[0].tolist() == [0] * 8
    for row in (1, -2):
        with pytest.raises(IndexError):
            sequences.batch(np.array([row]))


def test_an_id_outside_the_vocabulary_is_refused(make_sequences):
    sequences = make_sequences([[1, 259]], 8)
    with pytest.raises(ConfigError, match=r"document 0: found token id 259, needed below the tokenizer's 259"):
        sequences.batch(np.array([0]))


@given(st.integers(1, 50), st.integers(-5, 2**64), st.integers(0, 200))
def test_each_epoch_visits_every_row_once(num_rows, seed, epoch):
    positions = epoch * num_rows + np.arange(num_rows)
    assert sorted(rows_at(positions, num_rows, seed).tolist()) == list(range(num_rows))


def test_order_depends_on_seed_and_position_alone():
    whole = rows_at(np.arange(1000), 100, seed=3)
    assert rows_at(np.array([[999, 0], [250, 251]]), 100, seed=3).tolist() == [
        [whole[999], whole[0]],
        [whole[250], whole[251]],
    ]
    assert whole[:100].tolist() != whole[100:200].tolist()
    assert whole[:100].tolist() != rows_at(np.arange(100), 100, seed=4).tolist()
    assert whole[:100].tolist() != sorted(whole[:100].tolist())


def test_order_is_a_fair_shuffle():
    """The row at position 0 is spread evenly over 2000 epochs of 10 rows (5 standard deviations)."""
    first = rows_at(np.arange(2000) * 10, 10, seed=0)
    counts = np.bincount(first, minlength=10)
    assert abs(counts - 200).max() < 5 * np.sqrt(200 * 0.9)
