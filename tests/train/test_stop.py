"""SIGTERM at awkward moments: the last completed step is saved once, and the run that goes on misses nothing."""

import signal
import time

import pytest

from ep_jax import checkpoint, exits
from ep_jax import loop as loop_module
from ep_jax.checkpoint import CHECKPOINTS, UNFINISHED, Checkpointer, newest_whole, steps_found
from ep_jax.evaluation import Evaluator
from tests.train.tiny_run import (
    STRAIGHT,
    assert_same_bits,
    evaluations_of,
    finish,
    on_batch,
    options,
    rows_of,
    saved,
    start_process,
    terminate,
    train_here,
)

LIMIT_S = 60  # from the signal to the end of the process


def stop_then_go_on(corpus, folder, straight, stopped_at, monkeypatch):
    """Starts a run in which a signal was arranged, goes on with it, and compares both parts with the straight run."""
    ended = train_here(corpus, folder, **STRAIGHT)
    assert ended.code == exits.INTERRUPTED == 5
    assert f"stopped by SIGTERM: step {stopped_at} is saved" in ended.out
    assert newest_whole(folder / CHECKPOINTS).step == stopped_at
    assert not list((folder / CHECKPOINTS).glob(f"{UNFINISHED}*"))
    assert max(row["step"] for row in rows_of(folder)) == stopped_at
    monkeypatch.undo()
    assert train_here(corpus, folder, **STRAIGHT).code == 0
    assert rows_of(folder) == rows_of(straight[0])
    assert evaluations_of(folder) == evaluations_of(straight[0])
    assert_same_bits(saved(folder, 10)[0], saved(straight[0], 10)[0])


def test_right_after_the_first_step(corpus, tmp_path, straight, monkeypatch):
    """While the first files of the run folder are written."""
    original = loop_module.write_config
    monkeypatch.setattr(loop_module, "write_config", lambda config: (terminate(), original(config)))
    stop_then_go_on(corpus, tmp_path, straight, 1, monkeypatch)


def test_during_a_step(corpus, tmp_path, straight, monkeypatch):
    on_batch(monkeypatch, lambda done: done == 6 and terminate())
    stop_then_go_on(corpus, tmp_path, straight, 7, monkeypatch)


def test_during_an_evaluation(corpus, tmp_path, straight, monkeypatch):
    original = Evaluator.__call__
    monkeypatch.setattr(Evaluator, "__call__", lambda self, *args: (terminate(), original(self, *args))[1])
    stop_then_go_on(corpus, tmp_path, straight, 6, monkeypatch)


def test_during_a_background_save(corpus, tmp_path, straight, monkeypatch):
    original = checkpoint.checksums
    monkeypatch.setattr(checkpoint, "checksums", lambda *args: (time.sleep(1), original(*args))[1])

    def action(done):
        if done == 6:
            deadline = time.monotonic() + 20
            while not (tmp_path / CHECKPOINTS / f"{UNFINISHED}save-5").exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert steps_found(tmp_path / CHECKPOINTS) == []
            terminate()

    on_batch(monkeypatch, action)
    stop_then_go_on(corpus, tmp_path, straight, 7, monkeypatch)


def test_twice_saves_once(corpus, tmp_path, straight, monkeypatch):
    original, saves = Checkpointer.save, []

    def save(self, step, *args):
        saves.append(step)
        terminate()
        original(self, step, *args)
        terminate()

    monkeypatch.setattr(Checkpointer, "save", save)
    on_batch(monkeypatch, lambda done: done == 2 and terminate())
    stop_then_go_on(corpus, tmp_path, straight, 3, monkeypatch)
    assert saves == [3]


def test_during_the_last_step_finishes_the_run(corpus, tmp_path, straight, monkeypatch):
    on_batch(monkeypatch, lambda done: done == 9 and terminate())
    assert train_here(corpus, tmp_path, **STRAIGHT).code == exits.DONE
    assert rows_of(tmp_path) == rows_of(straight[0])
    assert (tmp_path / "summary.json").exists()


def wait_for(process, text):
    """Reads a process's stdout up to a line with the text."""
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"no line with {text!r}: {process.stderr.read()}")


def test_a_process_in_its_first_compilation_leaves_nothing(corpus, tmp_path):
    process = start_process(*options(corpus, tmp_path / "run"))
    try:
        wait_for(process, "protocol:")
        time.sleep(1)
        process.terminate()
        began = time.monotonic()
        [ended] = finish(process)
    finally:
        process.kill()
    assert time.monotonic() - began < LIMIT_S
    assert ended.code == -signal.SIGTERM
    assert "first step done" not in ended.out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("signals", [1, 2])
def test_a_process_ends_with_the_documented_code_and_goes_on(corpus, tmp_path, cached, monkeypatch, signals):
    folder = tmp_path / "run"
    process = start_process(*options(corpus, folder, train__steps=100_000), **cached)
    try:
        wait_for(process, "step      3/100000")
        for _ in range(signals):
            process.terminate()
        began = time.monotonic()
        [ended] = finish(process)
    finally:
        process.kill()
    assert time.monotonic() - began < LIMIT_S
    assert ended.code == exits.INTERRUPTED, ended.err
    step = newest_whole(folder / CHECKPOINTS).step
    assert f"stopped by SIGTERM: step {step} is saved" in ended.out
    assert [row["step"] for row in rows_of(folder)] == list(range(1, step + 1))

    on_batch(monkeypatch, lambda done: done == step + 1 and terminate())
    assert train_here(corpus, folder, train__steps=100_000).code == exits.INTERRUPTED
    assert [row["step"] for row in rows_of(folder)] == list(range(1, step + 3))
