"""A run that stops and goes on is the run that never stopped: bit for bit, and on other meshes and transports."""

import json

import jax
import numpy as np
import pytest

from ep_jax.checkpoint import CHECKPOINTS, newest_whole, steps_found
from ep_jax.fields import ConfigError
from ep_jax.report import ARRAYS_FOLDER
from tests.train.tiny_run import (
    CLOCK,
    NO_DROP,
    STRAIGHT,
    assert_same_bits,
    contents,
    copy_run,
    evaluations_of,
    losses_of,
    on_batch,
    rows_of,
    saved,
    summary_of,
    terminate,
    train_here,
)


@pytest.fixture(scope="module")
def resumed(corpus, half, tmp_path_factory):
    """The stopped run, gone on with by the same command."""
    folder = copy_run(half, tmp_path_factory.mktemp("runs") / "resumed")
    ended = train_here(corpus, folder, **STRAIGHT)
    assert ended.code == 0
    assert "resumed from" in ended.out
    assert "at step 5" in ended.out
    return folder


def test_rows_are_equal_and_none_is_missing_or_repeated(straight, resumed):
    """Losses, learning rates in and after warm-up, gradient norms, drops, tokens and held-out losses."""
    rows = rows_of(straight[0])
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows_of(resumed) == rows
    assert [row["step"] for row in evaluations_of(straight[0])] == [5]
    assert evaluations_of(resumed) == evaluations_of(straight[0])
    rates = [row["learning_rate"] for row in rows]
    assert np.argmax(rates) == 7
    assert any(row["drop_rate"] > 0 for row in rows)


def test_state_is_bitwise_equal(straight, resumed):
    state, metadata = saved(straight[0], 10)
    state_of_resumed, metadata_of_resumed = saved(resumed, 10)
    assert_same_bits(state_of_resumed, state)
    assert state["step"] == 10
    assert state["router"]["bias"].any()
    for metadata_of_run in (metadata, metadata_of_resumed):
        metadata_of_run.pop("config")  # has the run's folder in it
    assert metadata_of_resumed == metadata


def test_totals_continue(straight, resumed):
    counts = 0
    for path in sorted((resumed / ARRAYS_FOLDER).glob("*.npz")):
        with np.load(path) as arrays:
            counts = counts + arrays["counts_NPE"]
    summary = summary_of(resumed)
    np.testing.assert_array_equal(summary["totals"]["drops_NPE"], counts)
    assert summary["totals"]["tokens"] == rows_of(resumed)[-1]["tokens"]
    for name, value in summary_of(straight[0]).items():
        assert summary[name] == value or name in (*CLOCK, "seconds_of_steps", "startup")


@pytest.fixture(scope="module")
def continued(corpus, half, tmp_path_factory):
    """A function: the losses of steps 6 to 8 after step 5 was restored on a mesh, nothing dropped."""

    def run(mesh_shape, transport):
        folder = tmp_path_factory.mktemp("runs") / "continued"
        changes = {"resume": half / CHECKPOINTS / "5", "ep__transport": transport}
        changes |= {"ep__sender_factor": NO_DROP, "ep__receiver_factor": NO_DROP}
        with pytest.MonkeyPatch.context() as patch:
            on_batch(patch, lambda done: done == 7 and terminate())
            assert train_here(corpus, folder, mesh_shape, **changes).code == 5
        assert [row["step"] for row in rows_of(folder)] == [6, 7, 8]
        assert steps_found(folder / CHECKPOINTS) == [8]
        return losses_of(folder)

    return run


@pytest.fixture(scope="module")
def same_mesh(continued):
    return continued((1, 2, 4), "pooled_wave")


@pytest.mark.parametrize(
    ("mesh_shape", "transport", "tolerance"),
    [
        ((1, 1, 8), "pooled_wave", 1e-5),
        ((2, 2, 2), "pooled_wave", 1e-5),
        ((1, 2, 4), "ragged", 1e-4),
        ((1, 8, 1), "dense", 1e-4),
    ],
)
def test_goes_on_with_another_mesh_and_transport(continued, same_mesh, mesh_shape, transport, tolerance):
    np.testing.assert_allclose(continued(mesh_shape, transport), same_mesh, rtol=tolerance)


@pytest.mark.parametrize("change", ["seed", "data"])
def test_another_data_order_is_refused_unless_asked_for(corpus, half, copy_of, tmp_path, monkeypatch, change):
    folder = copy_of(half)
    other = {"train__seed": 1} if change == "seed" else {"data__held_out_fraction": 0.3}
    before = contents(folder)
    with pytest.raises(ConfigError, match=f"resume = 'auto': .* was made with another {change}; .*--resume {folder}"):
        train_here(corpus, folder, **other)
    assert contents(folder) == before

    on_batch(monkeypatch, lambda done: done == 6 and terminate())
    ended = train_here(corpus, tmp_path / "new", **other, resume=folder)
    assert ended.code == 5
    assert f"was made with another {change}; step 5 of the new data order comes next" in ended.out


def test_a_model_of_another_size_is_refused_with_the_shapes(corpus, half, copy_of):
    folder = copy_of(half)
    with pytest.raises(ConfigError, match=r"does not fit .* is float32\[2, 8, .* there and float32\[2, 16, .* here"):
        train_here(corpus, folder, router__num_experts=16)


def test_a_damaged_newest_checkpoint_is_passed_over_loudly(corpus, straight, copy_of):
    folder = copy_of(straight[0])
    largest = max((folder / CHECKPOINTS / "10").rglob("*"), key=lambda path: path.stat().st_size)
    damaged = bytearray(largest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    largest.write_bytes(damaged)
    ended = train_here(corpus, folder, **STRAIGHT)
    assert ended.code == 0
    assert f"WARNING: checkpoint {folder / CHECKPOINTS / '10'} is damaged" in ended.err
    assert "falling back to step 5" in ended.err
    assert rows_of(folder) == rows_of(straight[0])
    assert newest_whole(folder / CHECKPOINTS).step == 10
    assert_same_bits(saved(folder, 10)[0], saved(straight[0], 10)[0])


def test_a_save_that_fails_fails_the_run(corpus, straight, tmp_path):
    """A regular file lies where the second checkpoint must go."""
    folder = tmp_path / "run"
    in_the_way = folder / CHECKPOINTS / "10"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("in the way")
    ended = train_here(corpus, folder, **STRAIGHT)
    assert ended.code == 4
    [line] = [line for line in ended.out.splitlines() if line.startswith("checkpoint failed: ")]
    assert f"the checkpoint of step 10 could not be written to {in_the_way}" in line
    assert "done in" not in ended.out
    assert not (folder / "summary.json").exists()
    assert rows_of(folder) == rows_of(straight[0])  # flushed up to the failure
    assert newest_whole(folder / CHECKPOINTS).step == 5
    assert_same_bits(saved(folder, 5)[0], saved(straight[0], 5)[0])


def test_a_finished_run_started_again_does_nothing(corpus, straight, copy_of):
    folder = copy_of(straight[0])
    before = contents(folder)
    ended = train_here(corpus, folder, **STRAIGHT)
    assert ended.code == 0
    assert f"nothing to do: {folder / CHECKPOINTS / '10'} is at step 10 of 10" in ended.out
    assert contents(folder) == before


def test_a_run_killed_in_its_last_evaluation_only_finishes_its_report(corpus, straight, copy_of):
    """The last checkpoint is there, the summary is not: started again, the run trains nothing and writes it."""
    folder = copy_of(straight[0])
    wanted = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").unlink()
    rows = rows_of(folder)
    ended = train_here(corpus, folder, **STRAIGHT)
    assert ended.code == 0
    assert "nothing to do" not in ended.out
    found = json.loads((folder / "summary.json").read_text())
    for name in ("held_out_dropless", "held_out_as_trained", "held_out_bigram_cross_entropy", "totals", "step"):
        assert found[name] == wanted[name], name
    assert rows_of(folder) == rows


def test_never_starts_anew_in_an_old_folder(corpus, straight, copy_of):
    folder = copy_of(straight[0])
    ended = train_here(corpus, folder, **STRAIGHT, resume="never")
    assert ended.code == 0
    assert rows_of(folder) == rows_of(straight[0])
    assert jax.tree.leaves(saved(folder, 10)[0])
