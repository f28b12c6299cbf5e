"""Notebooks of experiments/ run headless from any folder and change nothing; what is committed is what they show now.

Each runs twice, by commands given in an empty folder: its text pair as a notebook (the kernel then stands in the
notebook's own folder, as in Jupyter and with `make notebooks`) and as a plain script. All start at once.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jupytext
import pytest

from ep_jax.config import load
from ep_jax.flops import num_parameters
from ep_jax.sweeps import read_sweep

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(path for path in (ROOT / "experiments").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
NAMES = [notebook.stem for notebook in NOTEBOOKS]
WATCHED = ("experiments", "benchmarks", "configs")
TIMEOUT_S = 120


def watched_files():
    """Path -> (size, time of the last change), caches left out."""
    found = [path for folder in WATCHED for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in found if path.is_file()}


def code_cells(notebook):
    return [cell for cell in jupytext.read(notebook).cells if cell.cell_type == "code"]


def texts(cell):
    """What a reader sees of a cell as text. Figures are left out: their bytes depend on fonts and on matplotlib."""
    found = []
    for output in cell.outputs:
        data = output.get("data", {})
        if not any(kind.startswith("image/") for kind in data):
            found.append(output.get("text") or data.get("text/markdown") or data.get("text/plain"))
    return found


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Runs everything. Returns {notebook: (end as a notebook, end as a script, file of the executed notebook)}, an end
    being (exit code, output), and the set of files that were changed or left behind."""
    scratch, before, running = tmp_path_factory.mktemp("notebooks"), watched_files(), {}
    for number, notebook in enumerate(NOTEBOOKS):
        work, result, pair = scratch / f"work{number}", scratch / f"result{number}.ipynb", notebook.with_suffix(".py")
        work.mkdir()
        jupyter = ("-m", "jupytext", "--quiet", "--to", "ipynb", "--execute", "--run-path", notebook.parent)
        running[notebook] = (
            start(work, *jupyter, "--output", result, pair),
            start(work, pair, MPLBACKEND="Agg"),
            result,
        )
    ended = {notebook: (end(first), end(second), result) for notebook, (first, second, result) in running.items()}
    after = watched_files()
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    return ended, changed | {path for work in scratch.glob("work*") for path in work.iterdir()}


def start(folder, *arguments, **variables):
    command = [sys.executable, *map(str, arguments)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=os.environ | variables, **output)


def end(process):
    output, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=NAMES)
def test_runs_from_an_empty_folder(notebook, executed):
    as_notebook, as_script, _ = executed[0][notebook]
    assert as_notebook[0] == 0, as_notebook[1]
    assert as_script[0] == 0, as_script[1]


def test_running_changes_no_file_and_leaves_none(executed):
    assert executed[1] == set()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=NAMES)
def test_committed_texts_are_those_of_now(notebook, executed):
    """Tables and verdicts, after a change of the data or of the code: `make notebooks` makes them anew."""
    *_, result = executed[0][notebook]
    for committed, now in zip(code_cells(notebook), code_cells(result), strict=True):
        assert texts(committed) == texts(now), committed.source


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=NAMES)
def test_committed_outputs_are_whole(notebook):
    """Executed from top to bottom, without an error or a warning, with figures."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert [output for output in outputs if "image/png" in output.get("data", {})]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=NAMES)
def test_says_what_to_look_at_and_ends_in_a_verdict(notebook):
    prose = [cell.source for cell in jupytext.read(notebook).cells if cell.cell_type == "markdown"]
    assert "look at" in prose[0].lower()
    assert prose[-1].startswith("## Verdict")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=NAMES)
def test_equals_its_text_pair(notebook):
    """By the check that commits go through."""
    specification = importlib.util.spec_from_file_location("check_notebooks", ROOT / ".ci" / "check_notebooks.py")
    check = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(check)
    assert check.complaint(notebook) == ""


def test_every_text_pair_has_its_notebook():
    paired = [path for path in (ROOT / "experiments").rglob("*.py") if "\n#     formats: ipynb" in path.read_text()]
    assert sorted(path.with_suffix(".ipynb") for path in paired) == NOTEBOOKS


def test_the_shipped_sweep_is_the_one_whose_results_are_shown(monkeypatch):
    """configs/sweeps/capacity_ep16.toml has the members, sizes and steps of experiments/results/capacity_ep16.json."""
    monkeypatch.chdir(ROOT)  # the sweep names its base by a path
    members = read_sweep("configs/sweeps/capacity_ep16.toml").members
    runs = json.loads((ROOT / "experiments" / "results" / "capacity_ep16.json").read_text())["runs"]
    assert not [member.refusal for member in members if member.refusal]
    assert [member.values for member in members] == [run["settings"] for run in runs]
    for member, run in zip(members, runs, strict=True):
        total, active = num_parameters(member.config.model, member.config.router)
        assert (run["parameters"], run["active_parameters"]) == (total, active)
        assert run["summary"]["step"] == member.config.train.steps
    base = load("configs/ladder/ep_d192.toml")
    assert all(member.config.model == base.model and member.config.data == base.data for member in members)
