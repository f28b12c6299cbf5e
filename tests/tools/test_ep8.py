"""`tools.ep8`: commands that their tools take, stages that cannot hurt each other, files made from what they left."""

import json
import shlex
import subprocess
import sys
import tarfile
import time

import pytest

from ep_jax.cli import split_args
from ep_jax.config import load
from ep_jax.ep.settings import TRANSPORTS
from ep_jax.fields import ConfigError
from tests.gpu.test_gpu_protocol import CASES, FSDP_SIZES
from tools.bench import __main__ as bench
from tools.bench import table
from tools.bench.shapes import SHAPES, routing
from tools.ep8.__main__ import hardware, main, run_all
from tools.ep8.results import Finished, comparison
from tools.ep8.run import DONE, FAILED, NOT_RUN, STOPPED, Outcome
from tools.ep8.stages import TRAINED, Machine, Stage, stages

DEVICES = {"device_kind": "NVIDIA H200", "devices": 8, "versions": {"jax": "0.11.2"}}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_every_command_is_one_that_its_tool_takes(devices, quick, tmp_path):
    found = stages(Machine(platform="gpu", devices=devices, quick=quick), tmp_path, 200)
    assert len({stage.name for stage in found}) == len(found)
    seeds = set()
    for stage in found:
        _, module, *words = stage.arguments
        if module == "tools.bench":
            arguments = bench.parse(words)
            assert arguments.out == stage.result
            assert quick or arguments.iterations >= 20  # what a committed result needs
            assert all(shape.num_experts(devices) % devices == 0 for shape in arguments.shapes)
            assert all(shape.num_experts(devices) >= shape.choices for shape in arguments.shapes)
        elif module == "ep_jax.train":
            given = split_args(words, command="", description="")
            config = load(given.config, given.overrides)
            assert (config.train.steps, config.mesh.ep, config.folder) == (200, -1, stage.result)
            one = load("h200").train  # a microbatch of it on every device
            rows = one.sequences_per_device * devices
            assert quick or (config.train.sequences_per_step, config.train.accumulation) == (rows, 1)
            assert f"train_{config.ep.transport}" == stage.name
            seeds.add(config.train.seed)
        else:
            assert module == "pytest"
    assert [stage.name for stage in found if stage.trains] == [f"train_{transport}" for transport in TRAINED]
    assert len(seeds) == 1


def test_conformance_is_of_every_transport_on_three_meshes():
    assert {case["transport"] for case in CASES} == set(TRANSPORTS)
    assert FSDP_SIZES == [1, 2, 4]


def test_few_local_experts_are_few():
    assert [SHAPES[name].num_experts(8) // 8 for name in ("few1", "few2")] == [1, 2]
    assert SHAPES["few2"].rows == SHAPES["A"].rows
    ids, _ = routing("document", SHAPES["few2"], 2)
    assert ids.shape == (2 * SHAPES["few2"].tokens, SHAPES["few2"].choices)


def test_a_dry_run_shows_commands_and_time(capsys):
    assert main(["--dry-run", "--stages", "layer,train_ragged", "--minutes", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("layer (100 s): python -m tools.bench layer --shapes A,B,C")
    assert lines[1].startswith("train_ragged (490 s): python -m ep_jax.train --config configs/h200.toml")
    assert lines[2:] == [
        "2 stages should take 9.8 minutes; --minutes is 1",
        "that is too little: the last stages will be cut short or left out; trainings are of 200 steps (--train-steps)",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dry-run", "--stages", "layers"], "--stages layers: allowed are conformance, collectives"),
        (["--dry-run", "--minutes", "0"], "--minutes 0.0"),
        (["--dry-run", "--train-steps", "0"], "--train-steps 0"),
        ([], "--out FOLDER is missing"),
    ],
)
def test_a_wrong_command_is_one_line(argv, message):
    with pytest.raises(ConfigError, match=message):
        main(argv)


def test_without_gpus_only_quick_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(ConfigError, match="allowed is --quick"):
        main(["--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def python(name, code, work, expected_s=60, **others) -> Stage:
    return Stage(name, ("-c", code), expected_s, work / name, **others)


def test_no_stage_hurts_another(tmp_path):
    """One fails, one hangs with a child, one damages its result, one trains and then waits, and one has no time."""
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    out.mkdir()
    hang = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(987654)'])"
    row = {"step": 5, "loss": 2.5, "drop_rate": 0.25, "step_ms": None, "tokens_per_second": 1e4, "mfu": None}
    train = f"""
import pathlib, time
folder = pathlib.Path({str(work / "train_x")!r})
folder.mkdir()
(folder / "metrics.jsonl").write_text({json.dumps(row)!r} + chr(10))
time.sleep(987654)
"""
    todo = [
        python("fails", "print('what went wrong'); raise SystemExit(3)", work),
        python("hangs", hang, work, expected_s=1),
        python("damages", f"open({str(work / 'damages')!r}, 'w').write('half of')", work),
        python("train_x", train, work, steps=5),
        python("late", "", work, expected_s=10_000),
    ]
    began = time.monotonic()
    finished = run_all(todo, out, DEVICES, deadline=began + 1000, work=work)
    assert [one.outcome.state for one in finished] == [FAILED, STOPPED, DONE, DONE, NOT_RUN]
    assert time.monotonic() - began < 30
    assert "987654" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout

    [file] = out.glob("ep8_h200x8_*.json")
    assert {path.name for path in out.iterdir()} == {file.name, "summary.txt", "logs.tar.gz"}
    content = json.loads(file.read_text())
    assert [content["stages"][stage.name]["state"] for stage in todo] == [one.outcome.state for one in finished]
    [training] = content["results"]
    assert (training["stage"], training["training"][0]["loss"]) == ("train_x", 2.5)
    text = (out / "summary.txt").read_text()
    assert "what went wrong" in text
    assert "late                not run, 0 s: " in text
    with tarfile.open(out / "logs.tar.gz") as archive:
        assert {"fails.log", "late.log", "train_x_metrics.jsonl"} <= set(archive.getnames())


def test_trainings_are_compared_at_the_last_step_that_all_reached(tmp_path):
    def trained(name, steps):
        common = {"drop_rate": 0.5, "step_ms": 10.0, "tokens_per_second": 1e6, "mfu": 0.25}
        rows = [{"step": step, "loss": 10 / step} | common for step in steps]
        stage = Stage(name, (), 1, tmp_path, steps=20)
        return Finished(stage, Outcome(DONE, 1), tmp_path, [{"stage": name, "training": rows}])

    lines = comparison([trained("one", [1, 5, 10, 20]), trained("two", [1, 5, 10])]).splitlines()[1:]
    assert [line.split()[:3] for line in lines] == [
        ["one", "10", "1.0000"],
        ["one", "20", "0.5000"],
        ["two", "10", "1.0000"],
    ]
    assert lines[0].split()[3:] == ["50.000", "10.0", "1,000,000", "25.0"]


def test_two_stages_end_to_end(tmp_path, pytestconfig):
    """The smallest cases on 8 virtual devices: result file, summary, and a table from it."""
    arguments = ["--quick", "--stages", "collectives,conformance", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.ep8", *arguments],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = tmp_path.glob("ep8_cpux8_*.json")
    content = json.loads(file.read_text())
    assert content["devices"]["used_devices"] == 8
    assert [shlex.split(command)[2] for command in content["commands"]] == ["pytest", "tools.bench"]
    test, exchange = content["results"]
    assert (test["stage"], test["outcome"]) == ("conformance", "passed")
    assert (exchange["stage"], exchange["shape"]) == ("collectives", "toy")
    assert exchange["times"]["median_ms"] > 0
    text = (tmp_path / "summary.txt").read_text()
    assert "1 of 1 passed" in text
    assert "toy   all_to_all of 512 rows" in text
    assert len(table.table([file]).splitlines()) == 2  # readable, and no layer in it
    assert hardware(content["devices"]) == "cpux8"
