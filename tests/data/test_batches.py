"""Batches on the mesh: same order for every mesh and process count, exact resuming, limits refused, no hang."""

import itertools
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ep_jax.data import DataConfig, open_dataset
from ep_jax.data.batches import BatchStream, Layout, check_same_everywhere, held_out_batches
from ep_jax.fields import ConfigError
from ep_jax.mesh import AXES


def mesh_of(*shape, devices=None):
    return Mesh(np.array(devices or jax.devices()[: np.prod(shape)]).reshape(shape), AXES)


@pytest.fixture(scope="module")
def sequences(make_sequences):
    rng = np.random.default_rng(0)
    return make_sequences([rng.integers(0, 256, rng.integers(1, 60)).tolist() for _ in range(40)], 16)


def stream_of(sequences, mesh, **changes):
    return BatchStream(sequences, **(dict(seed=5, sequences_per_step=16, accumulation=2, mesh=mesh) | changes))


def take(iterator, count):
    return [(step, [np.asarray(array) for array in batch]) for step, batch in itertools.islice(iterator, count)]


def assert_equal(mine, theirs):
    assert [step for step, _ in mine] == [step for step, _ in theirs]
    for (_, a), (_, b) in zip(mine, theirs, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def test_batches_have_the_promised_shape_placement_and_rows(sequences):
    mesh = mesh_of(2, 2, 2)
    stream = stream_of(sequences, mesh)
    step, batch = next(stream.from_step(3))
    assert step == 3
    for name, dtype in zip(batch._fields, (np.int32, np.int32, np.bool_, np.int32, np.int32), strict=True):
        array = getattr(batch, name)
        assert array.shape == (2, 8, 16)
        assert array.dtype == dtype
        assert array.sharding.spec == PartitionSpec(None, AXES, None)
    wanted = sequences.batch(stream.rows(3))
    for array, expected in zip(batch, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(array).reshape(16, 16), expected)


def test_every_mesh_gives_the_same_batches(sequences):
    """Also a mesh whose devices are in another order, and one with fewer devices."""
    wanted = take(stream_of(sequences, mesh_of(1, 2, 4)).from_step(), 6)
    for mesh in (mesh_of(2, 2, 2), mesh_of(1, 8, 1), mesh_of(1, 2, 1), mesh_of(1, 4, 2, devices=jax.devices()[::-1])):
        assert_equal(take(stream_of(sequences, mesh).from_step(), 6), wanted)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_process_count_gives_the_same_rows(sequences, processes):
    """Each process reads the rows of its devices; together they are the batch, in order."""
    stream = stream_of(sequences, mesh_of(1, 2, 4))
    parts = []
    for rows in np.split(np.arange(8), processes):
        layout = Layout(sequences, sequences_per_step=16, accumulation=2, mesh=mesh_of(1, 2, 4))
        layout.local_rows = rows
        parts.append(layout.read(stream.rows(7)))
    wanted = sequences.batch(stream.rows(7))
    for *arrays, expected in zip(*parts, wanted, strict=True):
        np.testing.assert_array_equal(np.concatenate(arrays, axis=1).reshape(expected.shape), expected)


def test_resuming_at_a_step_equals_the_tail_of_a_straight_run(sequences):
    mesh = mesh_of(1, 2, 4)
    straight = take(stream_of(sequences, mesh).from_step(), 10)
    assert_equal(take(stream_of(sequences, mesh).from_step(5), 5), straight[5:])


def test_accumulation_and_prefetch_do_not_change_the_sequences_of_a_step(sequences):
    mesh = mesh_of(1, 1, 8)
    one = take(stream_of(sequences, mesh, accumulation=1, prefetch=1).from_step(), 3)
    two = take(stream_of(sequences, mesh, accumulation=2, prefetch=9).from_step(), 3)
    for (_, a), (_, b) in zip(one, two, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x.reshape(16, 16), y.reshape(16, 16))


def test_steps_walk_through_epochs_that_differ_and_cover_all_rows(sequences):
    stream = stream_of(sequences, mesh_of(1, 1, 8))
    num_rows = sequences.num_rows
    rows = np.concatenate([stream.rows(step) for step in range(-(-2 * num_rows // 16))])
    first, second = rows[:num_rows], rows[num_rows : 2 * num_rows]
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(num_rows))
    assert first.tolist() != second.tolist()


def test_held_out_rows_come_once_in_a_fixed_order_and_the_last_batch_is_filled(sequences):
    batches = list(held_out_batches(sequences, sequences_per_batch=16, accumulation=2, mesh=mesh_of(1, 2, 4)))
    assert len(batches) == -(-sequences.num_rows // 16)
    assert all(batch.tokens.shape == (2, 8, 16) for batch in batches)
    valid = np.concatenate([np.asarray(batch.valid).reshape(16, 16) for batch in batches])
    tokens = np.concatenate([np.asarray(batch.tokens).reshape(16, 16) for batch in batches])
    assert valid.sum() == sequences.num_inputs
    assert not valid[sequences.num_rows :].any()
    everything = sequences.batch(np.arange(sequences.num_rows)).tokens.tolist()
    assert sorted(tokens[: sequences.num_rows].tolist()) == sorted(everything)
    limited = list(
        held_out_batches(sequences, sequences_per_batch=8, accumulation=1, mesh=mesh_of(1, 2, 4), num_sequences=12)
    )
    assert len(limited) == 2
    some = np.concatenate([np.asarray(batch.tokens).reshape(8, 16) for batch in limited])[:12]
    np.testing.assert_array_equal(some, tokens[:12])
    assert [np.asarray(batch.valid).any(axis=-1).sum() for batch in limited] == [8, 4]


@pytest.mark.parametrize(
    ("num_tokens", "rows"),
    [(0, 0), (31, 1), (32, 2), (33, 2), (223, 7), (224, 8), (255, 8), (256, 9), (257, 9), (264, 9)],
)
def test_a_training_half_of_few_tokens_gives_its_batches_or_a_message(tmp_path, make_text, num_tokens, rows):
    """BL-66: rows of 32, 8 a step; n tokens make n + 1 inputs. Exact use at the limit, a refusal below it."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "held_out").write_bytes(make_text(40, held_out=True))
    (tmp_path / "text" / "train").write_bytes(make_text(num_tokens, held_out=False) if num_tokens else b"")
    config = DataConfig(
        source="text",
        path=str(tmp_path / "text"),
        sequence_length=32,
        held_out_fraction=0.5,
        cache_dir=str(tmp_path / "cache"),
    )
    if num_tokens == 0:
        with pytest.raises(ConfigError, match="found 1 documents, 0 for training and 1 held out; needed at least 1"):
            open_dataset(config, vocab_size=259)
        return
    train = open_dataset(config, vocab_size=259).train
    assert train.num_rows == rows
    arguments = dict(seed=0, sequences_per_step=8, accumulation=1, mesh=mesh_of(1, 2, 4))
    if rows < 8:
        with pytest.raises(ConfigError, match=f"found {rows} training rows of 32 tokens, needed at least 8"):
            BatchStream(train, **arguments)
        return
    _, batch = next(BatchStream(train, **arguments).from_step())
    assert int(np.asarray(batch.valid).any(axis=-1).sum()) == 8
    if rows == 8:
        assert int(np.asarray(batch.valid).sum()) == num_tokens + 1


@pytest.mark.parametrize(("per_step", "accumulation"), [(12, 1), (16, 3), (8, 2), (4, 8)])
def test_a_batch_that_does_not_fit_the_mesh_is_refused_with_both_numbers(sequences, per_step, accumulation):
    with pytest.raises(ConfigError, match=rf"train\.sequences_per_step = {per_step}: .*{accumulation} x 8"):
        stream_of(sequences, mesh_of(1, 2, 4), sequences_per_step=per_step, accumulation=accumulation)


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]


def wait_for_readers_to_end():
    end = time.monotonic() + 10
    while reader_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert not reader_threads()


def test_an_error_of_a_reader_is_raised_at_its_step_and_ends_the_threads(make_sequences):
    """One document holds an id outside the vocabulary; all steps before it are good."""
    documents = [[1] * 15 for _ in range(64)]
    documents[40] = [1] * 7 + [999] + [1] * 7
    sequences = make_sequences(documents, 16)
    stream = stream_of(sequences, mesh_of(1, 2, 4))
    bad_step = next(step for step in range(4) if 40 in sequences.packing.document[stream.rows(step)])
    iterator = stream.from_step()
    assert [step for step, _ in take(iterator, bad_step)] == list(range(bad_step))
    with pytest.raises(ConfigError, match="found token id 999"):
        next(iterator)
    wait_for_readers_to_end()


def test_closing_an_iterator_ends_its_threads(sequences):
    iterator = stream_of(sequences, mesh_of(1, 2, 4)).from_step()
    next(iterator)
    assert reader_threads()
    iterator.close()
    wait_for_readers_to_end()


def test_one_process_has_nothing_to_compare(sequences):
    assert check_same_everywhere(sequences) is None
