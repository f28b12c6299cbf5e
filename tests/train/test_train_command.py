"""`python -m ep_jax.train` as a user meets it: what it prints, what it leaves, what it refuses, and its exit codes."""

import json
import re
import time

import jax
import numpy as np
import pytest

from ep_jax import exits
from ep_jax import loop as loop_module
from ep_jax.checkpoint import CHECKPOINTS, newest_whole, steps_found
from ep_jax.config import load, to_toml
from ep_jax.fields import ConfigError
from ep_jax.metrics import METRICS
from ep_jax.trackers import read_rows
from ep_jax.watchdog import Watchdog
from tests.train.tiny_run import (
    STRAIGHT,
    contents,
    finish,
    losses_of,
    options,
    rows_of,
    saved,
    settings,
    start_process,
    summary_of,
    train_here,
)


@pytest.fixture(scope="module")
def command(corpus, cached, tmp_path_factory):
    """(folder it was started in, how it ended): a run from a TOML file in another folder, one mesh axis left open."""
    cwd = tmp_path_factory.mktemp("elsewhere")
    values = settings(mesh__ep=-1, checkpoint__every=5)
    names = {"data.source": "text", "data.path": str(corpus), "data.cache_dir": str(corpus.parent / "cache")}
    text = to_toml(load(None, [*values.items(), *names.items(), ("run_dir", "runs/here")]))
    (cwd / "my.toml").write_text(text)
    [ended] = finish(start_process("--config", "my.toml", cwd=cwd, JAX_NUM_CPU_DEVICES="8", **cached))
    assert ended.code == exits.DONE, ended.err
    return cwd, ended


def test_leaves_a_whole_run_folder(command):
    folder = command[0] / "runs" / "here"
    assert {path.name for path in folder.iterdir()} == {
        "config.toml", "devices.json", "metrics.jsonl", "arrays", "tensorboard", CHECKPOINTS, "summary.json",
    }  # fmt: skip
    assert load(str(folder / "config.toml")).mesh.shape == (1, 2, 4)  # -1 was resolved
    devices = json.loads((folder / "devices.json").read_text())
    assert (devices["platform"], devices["devices"], devices["processes"]) == ("cpu", 8, 1)
    assert devices["versions"]["jax"] == jax.__version__
    assert devices["environment"]["JAX_NUM_CPU_DEVICES"] == "8"
    assert list((folder / "tensorboard").glob("events.*"))
    assert len(list((folder / "arrays").glob("step_*.npz"))) == 10
    assert steps_found(folder / CHECKPOINTS) == [5, 10]
    assert newest_whole(folder / CHECKPOINTS).step == 10


def test_tells_what_starting_took(command):
    startup = summary_of(command[0] / "runs" / "here")["startup"]
    assert 0 < startup["compiling_s"] < startup["seconds_to_first_step"]
    assert startup["tracing_s"] > 0
    assert startup["programs"] >= 2  # the state and the step
    assert startup["cache_used"]  # JAX_COMPILATION_CACHE_DIR of the tests
    seconds = r"first step done after \d+s: \d+\.\d s tracing, \d+\.\d s compiling \d+ programs \(cache: \d+ read"
    assert re.search(seconds, command[1].out), command[1].out


def test_rows_have_every_name_and_the_loss_falls(command):
    rows = read_rows(command[0] / "runs" / "here" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 11))
    for row in rows:
        assert list(row)[: len(METRICS)] == list(METRICS)
        assert (row["mfu"], row["mfu_kept"]) == (None, None)  # a CPU's peak is unknown
        assert row["drop_rate"] == pytest.approx(row["drop_rate_sender"] + row["drop_rate_receiver"])
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert rows[-1]["tokens_per_second"] > 0
    assert [row["tokens"] for row in rows] == sorted(row["tokens"] for row in rows)


def test_shows_progress_and_what_came_of_it(command):
    cwd, ended = command
    lines = ended.out.splitlines()
    assert lines[0] == "mesh: replica 1 x fsdp 2 x ep 4 on 8 x cpu"
    assert any(line.startswith("model: ") and "active per token" in line for line in lines)
    progress = [line for line in lines if re.match(r"step +\d+/10 ", line)]
    assert len(progress) == 10
    pattern = r"step 10/10  100%  loss \d\.\d{4}  drop \d+\.\d\d% \(.* send, .* recv\)  \S+ tok/s  MFU -  ETA 0s"
    assert re.fullmatch(pattern, progress[-1])
    table = lines[lines.index(next(line for line in lines if "receiver %" in line)) :]
    assert [line.split()[0] for line in table[1:4]] == ["0", "1", "all"]
    for label in ("dropless", "pooled_wave as trained", "bigram table"):
        assert any(line.strip().startswith(label) for line in lines), label
    assert lines[-1].startswith("done in ")
    assert lines[-1].endswith("everything is in runs/here")
    summary = summary_of(cwd / "runs" / "here")
    assert summary["step"] == 10
    assert summary["held_out_dropless"]["drop_rate"] == 0
    assert summary["held_out_as_trained"]["cross_entropy"] > 0
    assert summary["held_out_bigram_cross_entropy"] > 0


def test_the_written_configuration_starts_the_same_run_which_is_finished(command):
    cwd, _ = command
    before = contents(cwd / "runs")
    [ended] = finish(start_process("--config", "runs/here/config.toml", cwd=cwd))
    assert ended.code == exits.DONE, ended.err
    assert "nothing to do" in ended.out
    assert contents(cwd / "runs") == before


def test_a_process_gives_the_numbers_of_a_call(command, straight):
    np.testing.assert_allclose(losses_of(command[0] / "runs" / "here"), losses_of(straight[0]), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "variables", "message"),
    [
        ({"mesh__ep": 3}, {"JAX_NUM_CPU_DEVICES": "8"}, "fsdp 2 x ep 3: needs 6 devices, found 8"),
        ({"train__sequences_per_step": 80000}, {}, "needed at least 80000"),
        ({"ep__transport": "raged"}, {}, "ep.transport = 'raged'"),
    ],
)
def test_a_refused_process_says_so_in_one_line_and_leaves_nothing(corpus, tmp_path, changes, variables, message):
    began = time.monotonic()
    [ended] = finish(start_process(*options(corpus, tmp_path / "run", **changes), **variables))
    assert time.monotonic() - began < 30
    assert ended.code == exits.REFUSED == 2
    [line] = ended.err.splitlines()
    assert line.startswith("refused: ")
    assert message in line
    assert "Traceback" not in ended.out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("mesh_shape", "changes", "message"),
    [
        ((1, 2, 2), {}, "fsdp 2 x ep 2: needs 4 devices, found 8"),
        ((1, 3, -1), {}, "fsdp 3 x ep -1"),
        ((1, 2, 4), {"router__num_experts": 6}, "router.num_experts = 6: must be a multiple of 4"),
        ((1, 8, 1), {"train__sequences_per_step": 12}, "train.sequences_per_step = 12: must be a multiple of 8"),
        ((1, 2, 4), {"train__eval_sequences": 12}, "train.eval_sequences = 12: must be a multiple of 8"),
        ((1, 2, 4), {"router__num_experts": 8.5}, "router.num_experts = 8.5: expected an integer"),
        ((1, 2, 4), {"optimizer__learning_rate": -1}, "optimizer.learning_rate = -1"),
        ((1, 2, 4), {"model__vocab_size": 200}, "model.vocab_size = 200: data.tokenizer = 'bytes' needs at least 259"),
        ((1, 2, 4), {"model__window": 16, "model__global_every": 2}, "model.window = 16: must be below"),
        ((1, 2, 4), {"resume": "/nowhere"}, "resume = '/nowhere': no such path"),
        ((1, 2, 4), {"profile__steps": "3:1"}, "profile.steps = '3:1'"),
    ],
)
def test_refusals_come_before_anything_is_written(corpus, tmp_path, mesh_shape, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
        train_here(corpus, tmp_path / "run", mesh_shape, **changes)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_refused_at_the_start(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("ep_jax.trackers.installed", lambda package: package != "tensorboardX")
    with pytest.raises(ConfigError, match=r"log.tensorboard = true: needs the package tensorboardX"):
        train_here(corpus, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_numbers_may_be_spelled_with_an_exponent(corpus, tmp_path, straight):
    changes = {"optimizer__learning_rate": "1e-2", "optimizer__weight_decay": "1e-1", "ep__sender_factor": "115e-2"}
    assert train_here(corpus, tmp_path, **STRAIGHT, **changes).code == exits.DONE
    assert rows_of(tmp_path) == rows_of(straight[0])


def test_every_phase_but_those_that_compile_has_a_limit(corpus, tmp_path, monkeypatch):
    phases = []
    monkeypatch.setattr(Watchdog, "enter", lambda self, phase, *, limited=True: phases.append((phase, limited)))
    assert train_here(corpus, tmp_path, **STRAIGHT, train__hang_timeout_s=600).code == exits.DONE
    assert phases[:2] == [("step 1", False), ("step 2, waiting for step 1,", True)]
    assert phases[4:9] == [
        ("step 5, waiting for step 4,", True),
        ("step 5", True),
        ("the evaluation after step 5", False),
        ("the save of step 5", True),
        ("step 6, waiting for step 5,", True),
    ]
    assert phases[-3:] == [
        ("the save of step 10", True),
        ("the end of the last save", False),
        ("the last evaluation", False),
    ]
    assert [phase for phase, limited in phases[:-2] if not limited] == ["step 1", "the evaluation after step 5"]


def test_settings_that_the_transport_does_not_use_are_named(corpus, tmp_path):
    changes = {"ep__transport": "dense", "ep__sender_factor": 2.0, "ep__order": "choice"}
    ended = train_here(corpus, tmp_path, **changes)
    assert ended.code == exits.DONE
    assert "note: not used by ep.transport = dense: ep.sender_factor, ep.order" in ended.out.splitlines()
    assert summary_of(tmp_path)["held_out_as_trained"] == summary_of(tmp_path)["held_out_dropless"]


@pytest.mark.parametrize("bad_step", [1, 3])
def test_a_bad_gradient_stops_the_run_and_is_not_saved(corpus, tmp_path, monkeypatch, bad_step):
    """A NaN appears in an expert's weight just before a step, as a faulty device would make one."""
    original = loop_module.make_train_step

    def make(config, mesh):
        step = original(config, mesh)

        def faulty(state, batch):
            if int(state["step"]) + 1 == bad_step:
                experts = state["params"]["blocks"]["layer_0"]["moe"]
                experts["expert_down"] = experts["expert_down"].at[1, 5, 2, 3].set(np.nan)
            return step(state, batch)

        return faulty

    monkeypatch.setattr(loop_module, "make_train_step", make)
    ended = train_here(corpus, tmp_path / "run", checkpoint__every=1, train__eval_every=1, optimizer__learning_rate=0.0)
    assert ended.code == exits.NON_FINITE == 3
    [line] = [line for line in ended.out.splitlines() if line.startswith("stopped: ")]
    assert line.startswith(f"stopped: step {bad_step}: ")
    assert "gradient of " in line
    assert "nothing was saved since" in line
    assert "done in" not in ended.out
    good_steps = list(range(1, bad_step))
    folder = tmp_path / "run"
    assert steps_found(folder / CHECKPOINTS) == good_steps[-2:]
    if good_steps:
        assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == good_steps
        state, _ = saved(folder, good_steps[-1])
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_a_step_without_valid_targets_is_reported(corpus, tmp_path, monkeypatch):
    """Everything masked: loss 0 and a warning, instead of 0.0 passed off as success."""
    from ep_jax.data.batches import BatchStream

    monkeypatch.setattr(BatchStream, "rows", lambda self, step: np.full(self.sequences_per_step, -1))
    ended = train_here(corpus, tmp_path)
    assert ended.code == exits.DONE
    assert [row["loss"] for row in rows_of(tmp_path)] == [0.0] * 10
    warnings = [line for line in ended.out.splitlines() if line.startswith("WARNING: step")]
    assert len(warnings) == 10
    assert "no valid target" in warnings[0]
