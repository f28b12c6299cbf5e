"""The repository's own files: test settings, what a wheel holds, versions, hooks, and one-line set-up failures."""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)


def checkout(folder):
    """A copy of what packaging and set-up need, so that the real checkout gets no build folders."""
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt", ".python-version", "Makefile"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("ep_jax", "kernels", "configs", "tools", "tests", ".ci"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_eight_cpu_devices_and_strict_ranks():
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8
    with pytest.raises(ValueError, match="jax_numpy_rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones(3)


def test_a_wrong_device_count_fails_the_session(tmp_path):
    (tmp_path / "conftest.py").write_text(
        (ROOT / "tests/conftest.py").read_text().replace('_devices", NUM', '_devices", 1 or NUM')
    )
    (tmp_path / "test_any.py").write_text("def test_any():\n    pass\n")
    result = run(sys.executable, "-m", "pytest", tmp_path, cwd=tmp_path)
    assert result.returncode == 3
    assert "tests need 8 CPU devices, JAX gives 1" in result.stdout + result.stderr


def test_wheel_holds_the_package_and_its_configs_only(tmp_path):
    source = checkout(tmp_path / "source")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    built = run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source)
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"ep_jax", "ep_jax_kernels"}
    in_checkout = {str(path.relative_to(ROOT)) for path in (ROOT / "ep_jax").rglob("*.py")}
    configs = {f"ep_jax/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.toml")}
    assert in_checkout | configs == {name for name in names if name.startswith("ep_jax/")}
    kernels = {f"ep_jax_kernels/{path.relative_to(ROOT / 'kernels')}" for path in (ROOT / "kernels").rglob("*.py")}
    assert kernels == {name for name in names if name.startswith("ep_jax_kernels/")}
    assert any(name.endswith("licenses/LICENSE") for name in names)

    # Away from the checkout the installed package finds its configuration.
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    code = "from ep_jax.config_files import shipped_configs; print(shipped_configs()['tiny'])"
    found = run(sys.executable, "-P", "-c", code, cwd=tmp_path, env=dict(os.environ, PYTHONPATH=str(installed)))
    assert found.stdout.strip() == str(installed / "ep_jax/configs/tiny.toml"), found.stderr


def test_constraints_pin_every_requirement_of_core_and_dev():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line) for line in lines)
    pinned = {normalised(name): version for name, _, version in (line.partition("==") for line in lines)}
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    for text in project["dependencies"] + extras["dev"] + extras["notebooks"] + extras["profile"]:
        requirement = Requirement(text)
        if requirement.name == "ep-jax":  # our own extra, whose packages are in the list
            continue
        assert pinned[normalised(requirement.name)] in requirement.specifier, text


def normalised(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_hooks_are_the_parts_of_make_lint():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    [repository] = config["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    [lint] = re.findall(r"^LINT := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [hook["entry"] for hook in repository["hooks"]] == [f"make --silent {part}" for part in lint.split()]


def test_help_lists_the_targets():
    shown = run("make", cwd=ROOT).stdout
    listed = {line.split()[1] for line in shown.splitlines() if line.startswith("make ")}
    assert listed == {"help", "tiny", "test", "lint", "format", "notebooks", "hooks"}


def set_up(folder, **variables):
    """Runs `make lint-sizes` (set-up, then the quickest target) in a folder with a space in its name."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder)} | variables
    result = run("make", "--silent", "lint-sizes", cwd=folder, env=environ)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    return result.returncode, lines


def test_old_python_is_refused_in_one_line(tmp_path):
    folder = checkout(tmp_path / "a folder")
    old = folder / "old"
    old.mkdir()
    for name in ("python3.12", "python3", "python"):
        (old / name).write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.11.2" && exit 0\nexit 1\n')
        (old / name).chmod(0o755)
    code, lines = set_up(folder, PATH=f"{old}:/usr/bin:/bin")
    assert code != 0
    assert lines == ["set-up: needs Python 3.12 or newer, found Python 3.11.2; install Python 3.12"]


def test_no_package_index_is_one_line_and_pip_log_is_named(tmp_path):
    folder = checkout(tmp_path / "a folder")
    new = folder / "new"
    new.mkdir()
    (new / "python3.12").symlink_to(Path(sys.executable).resolve())
    code, lines = set_up(folder, PATH=f"{new}:/usr/bin:/bin", PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    assert code != 0
    assert lines == [
        "set-up: pip cannot get the packages: is there a network and a package index? pip's log is .venv/pip.log"
    ]
    assert "setuptools" in (folder / ".venv/pip.log").read_text()
    assert not (folder / ".venv/.installed").exists()


def test_a_target_without_its_tool_says_so_in_one_line(tmp_path):
    folder = checkout(tmp_path / "a folder")
    run(sys.executable, "-m", "venv", "--without-pip", folder / ".venv")
    (folder / ".venv/.installed").touch()
    result = run("make", "--silent", "test", cwd=folder)
    assert result.returncode != 0
    assert (
        result.stderr.splitlines()[0]
        == "make test: pytest is missing from .venv; remove .venv/.installed and try again"
    )


@pytest.fixture
def stub_tests(tmp_path):
    """Makes a checkout whose pytest is a shell script that gets the folders as "$@"; returns the checkout."""

    def make(script):
        folder = checkout(tmp_path / "source")
        python = folder / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/bash\n[ "$1" = -c ] && exit\nshift 2\n{script}\n')
        python.chmod(0o755)
        (folder / ".venv/.installed").touch()
        return folder

    return make


def test_every_part_runs_and_its_output_stays_together(stub_tests):
    folder = stub_tests('echo "begin $@"; sleep 0.2; echo "end $@"; [ "$1" != tests/train ]')
    result = run("make", "--silent", "test", cwd=folder)
    assert result.returncode != 0
    assert "test-train] Error 1" in result.stderr
    begins, ends = result.stdout.splitlines()[::2], result.stdout.splitlines()[1::2]
    arguments = [line.removeprefix("begin ") for line in begins]
    assert arguments == [line.removeprefix("end ") for line in ends]
    folders = {text for text in arguments if text.startswith("tests/")}
    [others] = set(arguments) - folders
    assert set(others.split()) == {f"--ignore={folder}" for folder in folders}
    assert all((ROOT / folder).is_dir() for folder in folders)


def test_tests_that_pass_pass(stub_tests):
    assert run("make", "--silent", "test", cwd=stub_tests("true")).returncode == 0


def test_an_ended_make_leaves_no_part_running(stub_tests):
    folder = stub_tests("echo $$ >>started; exec sleep 60")
    make = subprocess.Popen(("make", "--silent", "test"), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        until(lambda: (folder / "started").exists() and len((folder / "started").read_text().split()) == 2)
        make.terminate()
        make.communicate(timeout=20)  # until all have closed its end of the pipe
    finally:
        make.kill()
    started = (folder / "started").read_text().split()
    assert len(started) == 2
    until(lambda: not any(Path("/proc", number).exists() for number in started))


def until(condition, limit_s=20):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_large_files_are_refused(tmp_path):
    (tmp_path / "large.bin").write_bytes(bytes(500_001))
    (tmp_path / "small.bin").write_bytes(bytes(500_000))
    result = run(sys.executable, ROOT / ".ci/check_sizes.py", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stdout == "large.bin: 500001 bytes, allowed are 500000\n"


def test_notebook_without_its_text_pair_is_refused(tmp_path):
    check = (sys.executable, ROOT / ".ci/check_notebooks.py")
    experiments = tmp_path / "experiments"
    experiments.mkdir()
    text = experiments / "drops.py"
    text.write_text("# %% [markdown]\n# # Drops\n\n# %%\nprint(1 + 1)\n")
    assert run(sys.executable, "-m", "jupytext", "--set-formats", "ipynb,py:percent", text).returncode == 0
    assert run(*check, cwd=tmp_path).returncode == 0
    text.write_text(text.read_text().replace("1 + 1", "1 + 2"))
    assert "drops.ipynb: differs from drops.py" in run(*check, cwd=tmp_path).stdout
    text.unlink()
    result = run(*check, cwd=tmp_path)
    assert result.returncode == 1
    assert "drops.ipynb: has no text pair drops.py" in result.stdout
