"""metrics.jsonl across crashes and resumes, TensorBoard events, array files, processes above 0, missing packages.

pytest tests/test_trackers.py
"""

import importlib.util
import json
import struct
import sys
import types

import numpy as np
import pytest

from ep_jax.fields import ConfigError
from ep_jax.metrics import LogConfig
from ep_jax.trackers import ArrayFiles, JsonLines, open_tracker, read_rows

JSON_ONLY = LogConfig(tensorboard=False)


def tracker(run_dir, config=JSON_ONLY, resumed_step=0, process_index=0):
    return open_tracker(config, run_dir, resumed_step=resumed_step, run_config={"a": 1}, process_index=process_index)


def write_steps(run_dir, steps, resumed_step=0):
    rows = tracker(run_dir, resumed_step=resumed_step)
    for step in steps:
        rows.log(step, {"loss": step / 2})
    return rows


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_every_row_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    write_steps(tmp_path, [1, 2])  # not finished: the process may be killed
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 1.0}\n'


def test_resume_removes_later_rows_and_repeats_or_misses_none(tmp_path):
    write_steps(tmp_path, range(1, 9))
    write_steps(tmp_path, range(6, 11), resumed_step=5).finish({})
    assert steps_in(tmp_path / "metrics.jsonl") == list(range(1, 11))


def test_a_line_cut_short_by_a_crash_is_repaired(tmp_path):
    write_steps(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-8])
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    write_steps(tmp_path, [3, 4], resumed_step=2).finish({})
    assert steps_in(path) == [1, 2, 3, 4]


def test_a_new_run_in_an_old_folder_starts_with_no_rows(tmp_path):
    write_steps(tmp_path, [1, 2, 3])
    write_steps(tmp_path, [1])
    assert steps_in(tmp_path / "metrics.jsonl") == [1]


def test_a_damaged_line_in_the_middle_is_refused_and_the_file_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = '{"step": 1}\nnot json\n{"step": 3}\n'
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl line 2 = 'not json': expected a JSON object with a step"):
        JsonLines(path, 3)
    assert path.read_text() == text


def test_values_are_strict_json(tmp_path):
    rows = tracker(tmp_path)
    rows.log(1, {"a": float("nan"), "b": np.float32(0.5), "c": np.int64(2**40), "d": None, "e": float("inf")})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1,
        "a": None,
        "b": 0.5,
        "c": 2**40,
        "d": None,
        "e": None,
    }


def test_only_process_0_writes(tmp_path):
    other = tracker(tmp_path / "run", LogConfig(), process_index=1)
    other.log(1, {"loss": 1.0})
    other.finish({})
    ArrayFiles(tmp_path / "arrays", resumed_step=0, process_index=1).write(1, {"counts": np.zeros(2)})
    assert list(tmp_path.iterdir()) == []


def events_in(folder):
    """(step, name, value) of all scalars in a folder's event files, read without TensorBoard."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        data, start = path.read_bytes(), 0
        while start < len(data):
            (length,) = struct.unpack_from("<Q", data, start)
            event = Event.FromString(data[start + 12 : start + 12 + length])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            start += 12 + length + 4
    return found


def test_tensorboard_gets_the_same_scalars(tmp_path):
    both = tracker(tmp_path, LogConfig(tensorboard=True))
    both.log(3, {"step": 3, "loss": 0.5, "mfu": None})
    both.finish({})
    assert events_in(tmp_path / "tensorboard") == [(3, "loss", 0.5)]
    assert steps_in(tmp_path / "metrics.jsonl") == [3]


@pytest.mark.parametrize(
    ("config", "package", "key"),
    [
        (LogConfig(tensorboard=True), "tensorboardX", r"log\.tensorboard = true"),
        (LogConfig(tensorboard=False, wandb_project="p"), "wandb", r"log\.wandb_project = 'p'"),
    ],
)
@pytest.mark.parametrize("found", [None, types.SimpleNamespace(origin=None)], ids=["absent", "a mere folder"])
def test_a_missing_package_is_refused_before_anything_is_written(tmp_path, monkeypatch, config, package, key, found):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == package else real(name))
    with pytest.raises(ConfigError, match=rf"^{key}: needs the package {package}") as refusal:
        tracker(tmp_path / "run", config)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_wandb_continues_one_run_across_resumes(tmp_path, monkeypatch):
    started, logged = [], []
    run = types.SimpleNamespace(log=lambda row, step: logged.append((step, row)), summary={}, finish=lambda: None)
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = types.SimpleNamespace(origin="wandb/__init__.py")
    wandb.util = types.SimpleNamespace(generate_id=lambda: f"id{len(started)}")
    wandb.init = lambda **settings: started.append(settings) or run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = LogConfig(tensorboard=False, wandb_project="p")
    for resumed_step in (0, 1):
        both = tracker(tmp_path, config, resumed_step)
        both.log(resumed_step + 1, {"loss": 0.5})
        both.finish({"final_loss": 0.25})
    assert [settings["id"] for settings in started] == ["id0", "id0"]
    assert started[0]["project"] == "p"
    assert started[0]["config"] == {"a": 1}
    assert logged == [(1, {"loss": 0.5}), (2, {"loss": 0.5})]
    assert run.summary == {"final_loss": 0.25}


def test_arrays_are_int64_and_cut_back_to_the_resumed_step(tmp_path):
    files = ArrayFiles(tmp_path, resumed_step=0, process_index=0)
    for step in (10, 20, 30):
        files.write(step, {"counts_LPE": np.full((2, 3, 4), step, np.int32), "lost_weight_L": np.zeros(2, np.float32)})
    with np.load(tmp_path / "step_00000020.npz") as arrays:
        assert arrays["counts_LPE"].dtype == np.int64
        assert arrays["lost_weight_L"].dtype == np.float32
        assert arrays["counts_LPE"].sum() == 24 * 20
    resumed = ArrayFiles(tmp_path, resumed_step=20, process_index=0)
    assert [path.name for path in resumed.paths()] == ["step_00000010.npz", "step_00000020.npz"]


def test_array_files_stay_few_and_cover_the_whole_run(tmp_path):
    files = ArrayFiles(tmp_path, resumed_step=0, process_index=0, limit=8)
    for step in range(1, 101):
        files.write(step, {"counts": np.zeros(1, np.int32)})
        assert len(files.paths()) <= 8
    kept = [int(path.stem.removeprefix("step_")) for path in files.paths()]
    assert kept[0] <= 10
    assert kept[-1] == 100
    assert list(tmp_path.glob("*.tmp")) == []
