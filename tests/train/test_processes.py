"""Two processes of four CPU devices train as one process of eight does, and stop together."""

import socket

import numpy as np
import pytest

from ep_jax import exits
from ep_jax.checkpoint import CHECKPOINTS, newest_whole, steps_found
from ep_jax.drop_report import load as load_arrays
from ep_jax.metrics import METRICS
from ep_jax.traces import Trace
from ep_jax.traces.recorder import TRACE_FOLDER
from ep_jax.trackers import read_rows
from tests.train.tiny_run import (
    STRAIGHT,
    config_of,
    finish,
    losses_of,
    on_batch,
    options,
    rows_of,
    start_process,
    summary_of,
    terminate,
    train_here,
)


@pytest.fixture(scope="module")
def start_pair(cached):
    """A function that starts the two processes of a command line."""

    def start(argv):
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            coordinator = f"localhost:{probe.getsockname()[1]}"
        return [
            start_process(
                *argv,
                EP_JAX_COORDINATOR=coordinator,
                EP_JAX_NUM_PROCESSES="2",
                EP_JAX_PROCESS_ID=str(index),
                **cached,
            )
            for index in (0, 1)
        ]

    return start


@pytest.fixture(scope="module")
def pair(corpus, start_pair, tmp_path_factory):
    """(run folder, how each process ended)."""
    folder = tmp_path_factory.mktemp("runs") / "pair"
    ended = finish(*start_pair(options(corpus, folder, trace__every=5, **STRAIGHT)))
    for process in ended:
        assert process.code == exits.DONE, process.err
    return folder, ended


def test_losses_are_those_of_one_process(pair, straight):
    rows, wanted = rows_of(pair[0]), rows_of(straight[0])
    assert [row["step"] for row in rows] == [row["step"] for row in wanted]
    np.testing.assert_allclose(losses_of(pair[0]), losses_of(straight[0]), rtol=1e-5)
    for row, expected in zip(rows, wanted, strict=True):
        for name in set(METRICS) & set(row):
            np.testing.assert_allclose(row[name], expected[name], rtol=1e-4, err_msg=name)
    got, expected = (summary_of(folder)["held_out_dropless"] for folder in (pair[0], straight[0]))
    np.testing.assert_allclose(got["cross_entropy"], expected["cross_entropy"], rtol=1e-4)


def test_each_process_records_the_routing_of_its_own_shards(pair):
    folder = pair[0] / TRACE_FOLDER
    assert len(list(folder.iterdir())) == 4
    for step in Trace(folder):
        assert step.valid_MST.shape == (1, 8, 16)
        counts_E = np.zeros(8, np.int64)
        for ids, valid in zip(step.expert_ids_NMSTK[1], step.valid_MST, strict=True):
            counts_E += np.bincount(ids[valid].ravel(), minlength=8)
        np.testing.assert_array_equal(counts_E, step.counts_NPE[1, 0])
        np.testing.assert_array_equal(step.counts_NPE, load_arrays(pair[0])[step.step]["counts_NPE"])


def test_there_is_one_run_folder_and_one_voice(pair):
    folder, (first, second) = pair
    assert "done in" in first.out
    assert "step 10/10" in first.out
    assert "step" not in second.out.replace("[Gloo]", "")
    assert config_of(folder).mesh.shape == (1, 2, 4)
    assert newest_whole(folder / CHECKPOINTS).step == 10
    assert len(read_rows(folder / "metrics.jsonl")) == 10
    assert len(read_rows(folder / "evaluations.jsonl")) == 1
    assert len(list((folder / "tensorboard").glob("events.*"))) == 1


def test_a_signal_to_one_process_stops_both_at_one_step(corpus, start_pair, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    argv = options(corpus, folder, train__steps=100_000)
    processes = start_pair(argv)
    try:
        for line in processes[0].stdout:
            if "step      3/100000" in line:
                break
        processes[1].terminate()
        ended = finish(*processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.code for process in ended] == [exits.INTERRUPTED] * 2, ended[0].err + ended[1].err
    step = newest_whole(folder / CHECKPOINTS).step
    assert steps_found(folder / CHECKPOINTS) == [step]
    assert f"step {step} is saved" in ended[0].out
    assert [row["step"] for row in rows_of(folder)] == list(range(1, step + 1))

    on_batch(monkeypatch, lambda done: done == step + 1 and terminate())
    assert train_here(corpus, folder, train__steps=100_000).code == exits.INTERRUPTED  # goes on in one process
    assert [row["step"] for row in rows_of(folder)] == list(range(1, step + 3))
