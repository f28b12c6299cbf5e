"""A real trace is written, opened again and holds the step; windows outside the run are said so."""

import json
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

from ep_jax import profiling
from ep_jax.fields import ConfigError
from ep_jax.profiling import ProfileConfig, Profiler


@jax.jit
def small_step(state):
    return jnp.tanh(state @ state) + jax.lax.fori_loop(0, 3, lambda _, x: x * 0.5, state)


def run_steps(steps, folder, first_step, last_step, stop_before=None):
    state = jnp.ones((32, 32))
    with Profiler(ProfileConfig(steps=steps), folder, first_step, last_step) as profiler:
        for step in range(first_step, last_step + 1):
            if step == stop_before:
                break
            with profiler.at_step(step):
                state = small_step(state)
    return state


def traced_steps(folder):
    return sum(event.name == profiling.STEP_NAME for event in profiling.read_trace(folder))


@pytest.mark.parametrize("first_step", [0, 5, 100])
def test_window_counts_from_the_first_step_of_this_run(tmp_path, first_step):
    run_steps("2:4", tmp_path, first_step, first_step + 4)
    [file] = profiling.trace_files(tmp_path)
    assert file.stat().st_size > 2000
    assert file.is_relative_to(tmp_path / "profile")
    steps = [event for event in profiling.read_trace(file, with_stats=True) if event.name == profiling.STEP_NAME]
    assert [event.stats["step_num"] for event in steps] == [first_step + 2, first_step + 3]


def test_trace_is_large_enough_and_opens_in_xprof(tmp_path):
    from xprof.convert import raw_to_tool_data

    run_steps("1:21", tmp_path, 0, 30)
    [file] = profiling.trace_files(tmp_path)
    assert file.stat().st_size > 10_000
    events = profiling.read_trace(file)
    assert {event.plane for event in events} >= {"/host:CPU"}
    assert traced_steps(file) == 20
    assert all(event.duration_ns >= 0 for event in events)
    data, kind = raw_to_tool_data.xspace_to_tool_data([str(file)], "trace_viewer", {})
    assert kind == "application/json"
    names = {event.get("name") for event in json.loads(data)["traceEvents"]}
    assert any(name and name.startswith(profiling.STEP_NAME) for name in names)


def test_off_writes_nothing(tmp_path):
    run_steps("", tmp_path, 0, 3)
    assert list(tmp_path.iterdir()) == []


def test_early_stop_and_exception_close_the_trace(tmp_path):
    run_steps("0:10", tmp_path / "early", 0, 9, stop_before=3)
    assert traced_steps(tmp_path / "early") == 3
    with (
        pytest.raises(FloatingPointError),
        Profiler(ProfileConfig(steps="0:10"), tmp_path / "failed", 0, 9) as profiler,
        profiler.at_step(0),
    ):
        raise FloatingPointError
    assert traced_steps(tmp_path / "failed") == 1
    run_steps("0:1", tmp_path / "again", 0, 0)  # the profiler was free again
    assert traced_steps(tmp_path / "again") == 1


@pytest.mark.parametrize(
    ("steps", "first_step", "last_step", "message", "traced"),
    [
        ("10:12", 0, 4, "means steps 10 to 11, this run has steps 0 to 4: no step is traced", 0),
        ("1:3", 100, 100, "means steps 101 to 102, this run has steps 100 to 100: no step is traced", 0),
        ("3:8", 0, 4, "means steps 3 to 7, this run has steps 0 to 4: fewer steps are traced", 2),
    ],
)
def test_window_outside_the_run_warns_with_the_numbers(tmp_path, steps, first_step, last_step, message, traced):
    with pytest.warns(UserWarning, match=message):
        run_steps(steps, tmp_path, first_step, last_step)
    if traced:
        assert traced_steps(tmp_path) == traced
    else:
        assert list(tmp_path.iterdir()) == []


def test_window_that_fits_exactly_does_not_warn(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Profiler(ProfileConfig(steps="3:5"), tmp_path, 0, 4)


@pytest.mark.parametrize("steps", ["5", "5:5", "7:5", "-1:3", "a:b", "1:2:3", ":"])
def test_malformed_window_is_refused(steps):
    with pytest.raises(ConfigError, match="profile.steps = .*expected"):
        ProfileConfig(steps=steps)


def test_missing_trace_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no .xplane.pb file at"):
        profiling.read_trace(tmp_path)


def test_device_description_is_json_and_complete():
    description = json.loads(json.dumps(profiling.device_description()))
    assert description["platform"] == "cpu"
    assert description["devices"] == description["devices_per_process"] == 8
    assert description["processes"] == 1
    assert description["versions"]["jax"] == jax.__version__
    assert {"jaxlib", "flax", "optax", "orbax-checkpoint"} <= description["versions"].keys()


def test_configuration_needs_no_jax():
    code = "import sys; import ep_jax.profiling, ep_jax.distributed, ep_jax.xla_flags; assert 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
