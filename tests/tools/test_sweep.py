"""Sweeps: members apart from each other, resumable, failures visible (FAULTS BL-70). Scheduling is tested with a stub
that trains nothing; the last test is a real sweep of two members."""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ep_jax import exits
from ep_jax.checkpoint import CHECKPOINTS, read_metadata, steps_found, whole
from ep_jax.config import load
from ep_jax.exits import MEMBERS_FAILED
from ep_jax.fields import ConfigError
from ep_jax.sweeps import FINISHED, HALF_DONE, NEW, REFUSED, read_sweep, state_of
from ep_jax.trackers import read_rows
from tools import sweep as tool
from tools.sweep import FAILED, STOPPED, main

ROOT = Path(__file__).parents[2]
STUB = (sys.executable, str(Path(__file__).with_name("stub_trainer.py")))
LIMIT_S = 30
GRID = "[grid]\nep.sender_factor = {}\n"


@pytest.fixture
def stub(monkeypatch):
    """Members are run by the stub."""
    monkeypatch.setattr(tool.run_members, "__kwdefaults__", {"command": STUB})
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def sweep_file(tmp_path):
    """Writes a sweep file whose members lie in tmp_path/out; returns its path."""

    def write(text, head=""):
        path = tmp_path / "my.toml"
        path.write_text(f'out = "{tmp_path}/out"\n{head}\n{text}')
        return str(path)

    return write


def rows_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / "sweep.jsonl").read_text().splitlines()]


def states(tmp_path):
    return [row["state"] for row in rows_of(tmp_path)]


def starts(folder):
    return len((folder / "starts.txt").read_text().splitlines())


# The file


def test_a_grid_is_every_combination_with_the_last_key_fastest(sweep_file):
    text = "[grid]\nep.sender_factor = [1, 1.25]\n'train.seed' = [3, 4, 5]\n"
    sweep = read_sweep(sweep_file(text, head="config = 'tiny'\nset.train.steps = 7"))
    assert sweep.keys == ["ep.sender_factor", "train.seed"]
    got = [(member.config.ep.sender_factor, member.config.train.seed) for member in sweep.members]
    assert got == [(1.0, 3), (1.0, 4), (1.0, 5), (1.25, 3), (1.25, 4), (1.25, 5)]
    assert sweep.members[0].name == "sender_factor=1.0,seed=3"
    tiny = load("tiny")
    for member in sweep.members:
        assert member.config.train.steps == 7
        assert member.config.optimizer == tiny.optimizer
        assert member.config.folder == member.folder == sweep.out / member.name
        assert not member.refusal


def test_a_list_gives_each_member_its_own_keys(sweep_file):
    text = "[[members]]\nep.transport = 'dense'\n[[members]]\n[members.ep]\nwaves = 2\nsequential = 3\n"
    with pytest.raises(ConfigError, match=r"ep.sequential = 3: no such key; did you mean"):
        read_sweep(sweep_file(text))
    sweep = read_sweep(sweep_file(text.replace("sequential = 3", "rescale = true")))
    assert [member.name for member in sweep.members] == ["transport=dense", "waves=2,rescale=true"]
    assert sweep.keys == ["ep.transport", "ep.waves", "ep.rescale"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[grid]\nep.sender_facto = [1.0]", "ep.sender_facto = [1.0]: no such key; did you mean ep.sender_factor?"),
        ("[grid]\nep = [1.0]", "ep = [1.0]: is a section"),
        ("[grid]\nep.sender_factor = 1.0", "ep.sender_factor = 1.0: expected a list"),
        ("[grid]\nep.sender_factor = []", "ep.sender_factor = []: expected a list"),
        ("[grid]\nep.sender_factor = [1, 1.0]", "member sender_factor=1.0 is given 2 times"),
        ("[grid]\nrun_dir = ['a', 'b']", "run_dir = ['a', 'b']: set by the sweep"),
        ("[grid]\nep.waves = [1]\n'ep.waves' = [2]", "ep.waves = [2]: already given"),
        ("[set]\nresume = 'never'\n[grid]\nep.waves = [1]", "resume = 'never': set by the sweep"),
        ("[set]\ntrain.steps = 0\n[grid]\nep.waves = [1]", "train.steps = 0: allowed is at least 1"),
        ("[grid]", "grid and members: allowed is one of them"),
        ("[grid]\nep.waves = [1]\n[[members]]\nep.waves = 2", "grid and members: allowed is one of them"),
        ("members = [1]", "members = [1]: expected tables"),
        ("grid = 3", "grid = 3: expected a table"),
        ("[gird]\nep.waves = [1]", "no part of a sweep; did you mean grid?"),
        ("[train]\nsteps = 3", "settings stand in [set]"),
        ("[grid]\nep.waves = [1", "my.toml': line"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_and_nothing_is_written(sweep_file, tmp_path, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
        main([sweep_file(text)])
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_a_base_that_resumes_elsewhere_is_refused(sweep_file, tmp_path):
    (tmp_path / "base.toml").write_text('resume = "runs/other"')
    with pytest.raises(ConfigError, match=r"resume = 'runs/other'"):
        read_sweep(sweep_file(GRID.format([1.0]), head=f'config = "{tmp_path}/base.toml"'))


def test_refusals_of_single_members_and_of_rules_between_sections(sweep_file):
    text = "[grid]\nep.sender_factor = [1.0, -1, 'much']\nrouter.num_experts = [16, 6]\n"
    sweep = read_sweep(sweep_file(text, head="config = 'tiny'"))
    assert [state_of(member) for member in sweep.members] == [NEW, *[REFUSED] * 5]
    refusals = [member.refusal for member in sweep.members]
    assert "router.num_experts = 6: must be a multiple of 4" in refusals[1]
    assert "ep.sender_factor = -1" in refusals[2]
    assert "ep.sender_factor = 'much': expected a number" in refusals[4]


def test_long_and_odd_values_make_plain_folder_names(sweep_file):
    text = f"[grid]\ndata.path = ['a/../b c', '{'x' * 300}', '{'x' * 301}']\n"
    names = [member.name for member in read_sweep(sweep_file(text)).members]
    assert names[0] == "path=a_.._b_c"
    assert len({*names}) == 3
    assert all(len(name) <= 120 and "/" not in name for name in names)


def test_the_shipped_capacity_sweep_is_whole():
    sweep = read_sweep(str(ROOT / "configs" / "sweeps" / "capacity.toml"))
    assert sweep.keys == ["ep.sender_factor", "ep.receiver_factor"]
    assert len(sweep.members) == 16
    for key in sweep.keys:
        values = {member.values[key] for member in sweep.members}
        assert (min(values), max(values)) == (1.0, 1.5)
    assert not [member.refusal for member in sweep.members if member.refusal]


# Running


@pytest.mark.usefixtures("stub")
def test_members_fail_alone_and_the_exit_code_says_so(sweep_file, tmp_path, capsys):
    path = sweep_file(GRID.format([1.0, -1.0, 1.25, 1.5, 3.0]))
    assert main([path, "--jobs", "2"]) == MEMBERS_FAILED == 7
    assert states(tmp_path) == [FINISHED, REFUSED, FINISHED, FAILED, FAILED]
    assert not (tmp_path / "out" / "sender_factor=-1.0").exists()
    refused, failed, silent = (rows_of(tmp_path)[place] for place in (1, 3, 4))
    assert "ep.sender_factor = -1.0" in refused["reason"]
    assert failed["reason"] == "exit code 3: stopped: step 2: gradient of head not finite"
    assert failed["exit_code"] == exits.NON_FINITE
    assert "without summary.json" in silent["reason"]
    out = capsys.readouterr().out
    assert "[4/5] sender_factor=1.5: failed: exit code 3" in out
    assert re.search(r"^ +1.25 +2.0000 +2.8000 +2.000 +1.000 +1.25k +3s +finished$", out, flags=re.M)
    assert "2 of 5 members finished" in out
    with open(tmp_path / "out" / "sweep.csv") as file:
        table = list(csv.DictReader(file))
    assert [row["ep.sender_factor"] for row in table] == ["1.0", "-1.0", "1.25", "1.5", "3.0"]
    assert (table[0]["drop_rate_training"], table[0]["loss_as_trained"], table[3]["seconds"]) == ("0.06", "3.0", "")
    assert (tmp_path / "out" / "sweep.png").stat().st_size > 10_000


@pytest.mark.usefixtures("stub")
def test_a_rerun_skips_the_finished_and_runs_the_others(sweep_file, tmp_path):
    path = sweep_file(GRID.format([1.0, 1.5]))
    for _ in range(2):
        assert main([path]) == MEMBERS_FAILED
    out = tmp_path / "out"
    assert (starts(out / "sender_factor=1.0"), starts(out / "sender_factor=1.5")) == (1, 2)
    assert (out / "sender_factor=1.0" / "starts.txt").read_text() == f"{out}/sender_factor=1.0\n"
    assert states(tmp_path) == [FINISHED, FAILED]
    assert main([sweep_file(GRID.format([1.0]))]) == exits.DONE  # a shorter list reuses what is there


@pytest.mark.usefixtures("stub")
def test_a_folder_of_another_configuration_is_neither_used_nor_resumed(sweep_file, tmp_path):
    assert main([sweep_file(GRID.format([1.0]))]) == exits.DONE
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"sender_factor=1.0: was begun with train.seed = 0, now it is 1"):
        main([sweep_file("[set]\ntrain.seed = 1\n" + GRID.format([1.0]))])
    (tmp_path / "out" / "sender_factor=1.25").mkdir()
    with pytest.raises(ConfigError, match=r"sender_factor=1.25: is not of this sweep"):
        main([sweep_file(GRID.format([1.25]))])
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "sender_factor=1.25"] == before


def start_sweep(path, *options):
    """The sweep in a process of its own, with the stub."""
    code = f"import sys; from tools import sweep; sweep.run_members.__kwdefaults__['command'] = {STUB!r}\n"
    code += "from ep_jax.exits import run_main; run_main(sweep.main)"
    return subprocess.Popen(
        [sys.executable, "-c", code, path, *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_sweep_goes_on_where_it_was(sweep_file, tmp_path, capsys, number):
    path, out = sweep_file(GRID.format([1.0, 2.0, 2.5, 1.25])), tmp_path / "out"
    process = start_sweep(path, "--jobs", "2")
    try:
        until(lambda: all((out / f"sender_factor={factor}" / "waiting").exists() for factor in (2.0, 2.5)))
        assert states(tmp_path) == [FINISHED, NEW, NEW, NEW]  # written as each ends
        os.killpg(process.pid, number)  # all of its group, like Ctrl-C in a terminal
        printed, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == exits.INTERRUPTED == 5, printed
    assert states(tmp_path) == [FINISHED, STOPPED, STOPPED, NEW]
    assert not (out / "sender_factor=1.25").exists()
    assert [state_of(member) for member in read_sweep(path).members] == [FINISHED, HALF_DONE, HALF_DONE, NEW]

    assert main([path]) == exits.DONE
    assert "sender_factor=2.0: resumed" in capsys.readouterr().out
    assert states(tmp_path) == [FINISHED] * 4
    assert [starts(out / f"sender_factor={factor}") for factor in (1.0, 2.0, 2.5, 1.25)] == [1, 2, 2, 1]


def test_a_second_signal_kills(sweep_file, tmp_path):
    path, member = sweep_file(GRID.format([2.75, 1.0])), tmp_path / "out" / "sender_factor=2.75"
    process = start_sweep(path)
    try:
        until((member / "waiting").exists)
        process.terminate()
        until((member / "asked").exists)
        process.terminate()
        printed, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == exits.INTERRUPTED, printed
    assert states(tmp_path) == [STOPPED, NEW]
    assert rows_of(tmp_path)[0]["exit_code"] == -signal.SIGKILL
    assert not child_numbers(member)


def test_members_of_a_killed_sweep_keep_others_out(sweep_file, tmp_path):
    path = sweep_file(GRID.format([2.0]))
    process = second = start_sweep(path)
    member = tmp_path / "out" / "sender_factor=2.0"
    try:
        until((member / "waiting").exists)
        process.kill()
        process.communicate()
        second = start_sweep(path)
        printed, _ = second.communicate(timeout=LIMIT_S)
        assert (second.returncode, "still running there" in printed) == (exits.REFUSED, True)
    finally:
        process.kill()
        second.kill()
        for number in child_numbers(member):
            os.kill(number, signal.SIGTERM)
    until((member / "checkpoints" / "3").exists)
    assert starts(member) == 1


def child_numbers(member):
    """Ids of the processes that were started with the member's configuration."""
    wanted = f"--config={member / 'member.toml'}".encode()
    lines = ((path.parent.name, path) for path in Path("/proc").glob("[0-9]*/cmdline"))
    found = []
    for number, path in lines:
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in words:
            found.append(int(number))
    return found


# Without running


def test_a_dry_run_shows_members_and_commands_and_writes_nothing(sweep_file, tmp_path, capsys):
    assert main([sweep_file(GRID.format([1.0, 1.25])), "--dry-run"]) == exits.DONE
    out = capsys.readouterr().out
    assert re.search(r"^ +1.25 .* new$", out, flags=re.M)
    assert f"-m ep_jax.train --config={tmp_path}/out/sender_factor=1.25/member.toml" in out
    assert main([sweep_file(GRID.format([1.0, -1.0])), "--dry-run"]) == MEMBERS_FAILED
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("stub")
def test_a_slurm_array_runs_each_unfinished_member(sweep_file, tmp_path, capsys):
    """The script is run here, task by task, with stand-ins for srun and python."""
    assert main([sweep_file(GRID.format([1.0]))]) == exits.DONE
    script = tmp_path / "job.sh"
    path = sweep_file(GRID.format([1.0, 1.25, -1.0, 1.75]))
    assert main([path, "--write", "slurm", str(script), "--jobs", "3"]) == MEMBERS_FAILED  # one is refused
    assert "refused: sender_factor=-1.0" in capsys.readouterr().out
    assert "#SBATCH --array=0-1%3\n" in script.read_text()
    for name, text in {"srun": 'exec "$@"', "python": f'shift 2; exec {shlex.join(STUB[:2])} "--config=$2"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for task in range(2):
        variables = {"SLURM_ARRAY_TASK_ID": str(task), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        subprocess.run(["bash", str(script)], env=os.environ | variables, check=True, timeout=LIMIT_S)
    assert main([path, "--collect"]) == MEMBERS_FAILED
    assert states(tmp_path) == [FINISHED, FINISHED, REFUSED, FINISHED]
    with pytest.raises(ConfigError, match=r"exists already"):
        main([path, "--write", "slurm", str(script)])


def test_a_jobset_for_each_member(sweep_file, tmp_path):
    file = tmp_path / "job.yaml"
    assert main([sweep_file(GRID.format([1.0, 1.25])), "--write", "jobset", str(file)]) == exits.DONE
    jobs = list(yaml.safe_load_all(file.read_text()))
    assert [job["metadata"]["name"] for job in jobs] == ["my-0", "my-1"]
    for job, factor in zip(jobs, (1.0, 1.25), strict=True):
        assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        [train] = job["spec"]["replicatedJobs"]
        [container] = train["template"]["spec"]["template"]["spec"]["containers"]
        assert container["command"][:4] == ["python", "-m", "ep_jax.train", "--config"]
        assert load(container["command"][4]).ep.sender_factor == factor


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--jobs", "0"], "--jobs 0: allowed is at least 1"),
        (["--write", "pbs", "job"], "--write pbs: allowed is slurm or jobset"),
        (["--dry-run", "--collect"], "not allowed with"),
        (["--job"], "expected one argument"),
    ],
)
def test_a_bad_command_line_is_refused(sweep_file, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        main([sweep_file(GRID.format([1.0])), *options])


# For real

SMALL = """
[train]
steps = 2
sequences_per_step = 2
eval_sequences = 2
[mesh]
ep = 2
[data]
source = "text"
path = "{corpus}"
cache_dir = "{corpus}-cache"
sequence_length = 16
held_out_fraction = 0.25
[model]
num_layers = 1
model_dim = 32
num_heads = 2
num_kv_heads = 1
head_dim = 16
latent_dim = 16
expert_hidden_dim = 16
shared_hidden_dim = 16
[router]
num_experts = 4
balancing = "none"
[optimizer]
learning_rate = 0.0
[log]
every = 1
tensorboard = false
"""


def test_a_real_sweep_of_two(tmp_path, monkeypatch):
    """Own folders, more drops at the smaller factor, and the same initial weights: nothing is learned here."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(40):
        (corpus / f"{i:02d}.txt").write_text(f"{i} is a number, and {i + 1} is the next one. " * 3)
    (tmp_path / "base.toml").write_text(SMALL.format(corpus=corpus))
    (tmp_path / "my.toml").write_text(
        'config = "base.toml"\nout = "out"\n[grid]\nep.sender_factor = [0.25, 4.0]\nep.receiver_factor = [4.0]\n'
    )
    for name in [name for name in os.environ if name.startswith(("XLA_", "JAX_", "EP_JAX_")) and name != "XLA_FLAGS"]:
        monkeypatch.delenv(name)
    own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert main(["my.toml", "--jobs", "2"]) == exits.DONE
    few, many = (row["results"] for row in rows_of(tmp_path))
    assert few["drop_rate_sender"] > 0.3 > many["drop_rate_sender"]
    assert few["loss_as_trained"] != few["loss_dropless"] == many["loss_dropless"]
    for row in rows_of(tmp_path):
        folder = Path("out", row["member"])
        assert steps_found(folder / CHECKPOINTS) == [2]
        assert [line["step"] for line in read_rows(folder / "metrics.jsonl")] == [1, 2]
        resolved = (folder / "config.toml").read_text()
        assert resolved == (folder / "member.toml").read_text()
        assert read_metadata(whole(folder / CHECKPOINTS, 2))["config"] == resolved
    assert main(["my.toml", "--collect"]) == exits.DONE
    assert [state_of(member) for member in read_sweep("my.toml").members] == [FINISHED] * 2
