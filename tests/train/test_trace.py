"""Routing traces of training and evaluation: what is recorded is what was routed, dropped and read, to the unit.

Letters: N layers, M microbatches, S shards, T tokens of a shard, K choices, P stages, E experts.
"""

import re
import shutil

import numpy as np
import pytest

from ep_jax import exits
from ep_jax.checkpoint import CHECKPOINTS
from ep_jax.data import open_dataset
from ep_jax.data.batches import BatchStream
from ep_jax.drop_report import load as load_arrays
from ep_jax.ep import reference
from ep_jax.ep.settings import EPConfig
from ep_jax.fields import ConfigError
from ep_jax.traces import Trace
from ep_jax.traces.recorder import HELD_OUT_TRACE_FOLDER, TRACE_FOLDER, Recorder
from tests.ep.ep_cases import policy_of
from tests.train.tiny_run import (
    config_of,
    contents,
    copy_run,
    evaluate_here,
    losses_of,
    mesh_of,
    summary_of,
    train_here,
)
from tools import replay

CHANGES = dict(train__accumulation=2, train__sequences_per_step=16, train__steps=6, checkpoint__every=2)


@pytest.fixture(scope="module")
def traced(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "traced"
    ended = train_here(corpus, folder, trace__every=2, checkpoint__keep=5, **CHANGES)
    assert ended.code == exits.DONE
    return folder


def oracle_counts(step) -> np.ndarray:
    """int64 [N,P,E] of a recorded step under the policy it names, by the NumPy oracle."""
    header = step.header
    layers, microbatches, shards = step.expert_ids_NMSTK.shape[:3]
    counts_NPE = np.zeros((layers, 3, header.num_experts), np.int64)
    policy = policy_of(EPConfig(**header.policy))
    for layer, microbatch, first in np.ndindex(layers, microbatches, shards // header.ep):
        group = slice(first * header.ep, (first + 1) * header.ep)
        ids = step.expert_ids_NMSTK[layer, microbatch, group].astype(int)
        found = reference.fates(
            ids,
            step.weights_NMSTK[layer, microbatch, group],
            step.valid_MST[microbatch, group],
            num_experts=header.num_experts,
            sequence_length=header.sequence_length,
            policy=policy,
        )
        fate = found.fate
        for stage, mask in enumerate((fate != 3, fate == 1, fate == 2)):
            counts_NPE[layer, stage] += np.bincount(ids[mask], minlength=header.num_experts)
    return counts_NPE


def test_every_second_step_is_recorded_with_the_drops_that_training_logged(traced):
    trace, logged = Trace(traced / TRACE_FOLDER), load_arrays(traced)
    assert trace.steps == [2, 4, 6]
    for step in trace:
        assert step.expert_ids_NMSTK.shape == (2, 2, 8, 16, 2)
        np.testing.assert_array_equal(step.counts_NPE, logged[step.step]["counts_NPE"])
        np.testing.assert_array_equal(step.counts_NPE, oracle_counts(step))
        assert step.counts_NPE[:, 1].sum() > 0
        assert step.counts_NPE[:, 2].sum() > 0
    total = sum(float(step.weights_NMSTK[:, step.valid_MST].sum()) for step in trace)
    np.testing.assert_allclose(total, sum(logged[s]["weights_NP"][:, 0].sum() for s in trace.steps), rtol=1e-5)


def test_documents_and_positions_are_those_of_the_tokens(traced):
    config = config_of(traced)
    train = open_dataset(config.data, vocab_size=config.model.vocab_size).train
    stream = BatchStream(train, seed=0, sequences_per_step=16, accumulation=2, mesh=mesh_of(config))
    step = Trace(traced / TRACE_FOLDER).read(4)
    batch = stream.layout.read(stream.rows(3))
    tokens_MST = batch.tokens.reshape(step.valid_MST.shape)
    np.testing.assert_array_equal(step.valid_MST, batch.valid.reshape(step.valid_MST.shape))
    assert 0 < step.valid_MST.mean() <= 1
    tokenizer = train.store.manifest.tokenizer
    for place in np.argwhere(step.valid_MST)[::7]:
        document, position = step.document_MST[tuple(place)], step.position_MST[tuple(place)]
        wanted = tokenizer.bos if position == 0 else int(train.store.read(document, position - 1, position)[0])
        assert tokens_MST[tuple(place)] == wanted
    assert (step.document_MST[~step.valid_MST] == -1).all()


def test_recording_changes_no_loss(traced, corpus, tmp_path):
    assert train_here(corpus, tmp_path / "run", **CHANGES).code == exits.DONE
    np.testing.assert_allclose(losses_of(tmp_path / "run"), losses_of(traced), rtol=1e-6)
    assert not (tmp_path / "run" / TRACE_FOLDER).exists()


def test_a_resumed_run_records_again_what_came_after(traced, corpus, tmp_path):
    folder = copy_run(traced, tmp_path / "run")
    before = Trace(folder / TRACE_FOLDER).read(6)
    stale = folder / TRACE_FOLDER / "step_00000005.part0of1.npz"
    stale.write_bytes((folder / TRACE_FOLDER / "step_00000004.part0of1.npz").read_bytes())
    shutil.rmtree(folder / CHECKPOINTS / "6")
    (folder / "summary.json").unlink()
    argv = dict(trace__every=2, checkpoint__keep=5, **CHANGES)
    assert train_here(corpus, folder, **argv).code == exits.DONE
    trace = Trace(folder / TRACE_FOLDER)
    assert trace.steps == [2, 4, 6]
    np.testing.assert_array_equal(trace.read(6).expert_ids_NMSTK, before.expert_ids_NMSTK)


def test_evaluation_records_held_out_batches(traced, tmp_path):
    folder = copy_run(traced, tmp_path / "run")
    wanted = summary_of(folder)["held_out_as_trained"]
    assert evaluate_here(folder, "--trace.every", "1", "--train.eval_sequences", "24").code == exits.DONE
    trace = Trace(folder / HELD_OUT_TRACE_FOLDER)
    assert trace.steps == [1, 2]
    first, last = trace
    assert first.valid_MST.any(axis=2).all()
    assert (~last.valid_MST.any(axis=2)).sum() == 8  # half of the last batch is filled up with padding
    for step in (first, last):
        np.testing.assert_array_equal(step.counts_NPE, oracle_counts(step))
    assert wanted["valid_targets"] < sum(int(step.valid_MST.sum()) for step in trace)


def test_an_evaluation_records_only_when_asked(traced, tmp_path):
    folder = copy_run(traced, tmp_path / "run")
    assert evaluate_here(folder, "--trace.every", "1").code == exits.DONE
    before = contents(folder / HELD_OUT_TRACE_FOLDER)
    assert evaluate_here(folder).code == exits.DONE  # the run's own trace.every is 2
    assert contents(folder / HELD_OUT_TRACE_FOLDER) == before
    with pytest.raises(ConfigError, match="trace.every = 9: allowed is 1 to 1"):
        evaluate_here(folder, "--trace.every", "9")
    assert contents(folder / HELD_OUT_TRACE_FOLDER) == before


def test_a_step_that_is_not_finite_is_not_recorded(corpus, tmp_path):
    ended = train_here(corpus, tmp_path / "run", trace__every=1, optimizer__learning_rate=1e30, **CHANGES)
    assert ended.code == exits.NON_FINITE
    bad = int(re.search(r"step (\d+): ", ended.out.splitlines()[-1])[1])
    recorded = tmp_path / "run" / TRACE_FOLDER
    assert (Trace(recorded).steps if recorded.exists() else []) == list(range(1, bad))


def test_replay_agrees_with_training(traced, capsys):
    assert replay.main([str(traced / TRACE_FOLDER), "--check"]) == exits.DONE
    assert "3 steps" in capsys.readouterr().out


def test_a_trace_that_cannot_be_written_ends_the_run(corpus, tmp_path, monkeypatch):
    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ep_jax.traces.recorder.write_step", full_disk)
    with pytest.raises(OSError, match="No space left"):
        train_here(corpus, tmp_path / "run", trace__every=1, **CHANGES)


def test_size_is_told_before_it_is_written(traced):
    config = config_of(traced)
    train = open_dataset(config.data, vocab_size=config.model.vocab_size).train
    stream = BatchStream(train, seed=0, sequences_per_step=16, accumulation=2, mesh=mesh_of(config))
    recorder = Recorder(config, mesh_of(config), stream.layout, traced / TRACE_FOLDER, "test")
    assert recorder.step_bytes == 2 * 16 * 16 * 2 * (1 + 4)  # layers, rows, columns, choices, bytes
    recorder.close()


def test_emulated_shards_are_recorded_as_shards(corpus, tmp_path):
    changes = dict(ep__emulated_shards=8, train__sequences_per_step=16, train__steps=2, trace__every=2)
    assert train_here(corpus, tmp_path / "run", (1, 2, 4), **changes).code == exits.DONE
    [step] = Trace(tmp_path / "run" / TRACE_FOLDER)
    assert (step.header.ep, step.valid_MST.shape) == (8, (1, 16, 16))
    assert step.counts_NPE[:, 1:].sum() > 0
    np.testing.assert_array_equal(step.counts_NPE, oracle_counts(step))
