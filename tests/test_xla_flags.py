"""XLA presets start in a process of their own; users' flags are kept, bad ones refused in one line."""

import os
import subprocess
import sys

import pytest

from ep_jax import xla_flags
from ep_jax.fields import ConfigError

SHOW_DEVICES = """
import sys
from ep_jax import xla_flags
print(xla_flags.prepare(sys.argv[1], int(sys.argv[2])))
import jax
print(jax.devices())
"""


def run_child(*arguments, **variables):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    environ |= {"JAX_PLATFORMS": "cpu"} | variables
    command = [sys.executable, "-c", SHOW_DEVICES, *map(str, arguments)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("preset", [preset.name for preset in xla_flags.PRESETS])
def test_shipped_preset_starts_jax(preset):
    child = run_child(preset, 3)
    assert child.returncode == 0, child.stderr
    applied, devices = child.stdout.splitlines()
    assert devices == "[CpuDevice(id=0), CpuDevice(id=1), CpuDevice(id=2)]"
    for flag in xla_flags.find_preset(preset).flags:
        assert flag.removeprefix("--") in applied


def test_removed_flags_end_a_process_that_is_not_protected():
    """The list of removed flags is true: jaxlib names every one of them as unknown."""
    flags = " ".join(f"--{name}=1" for name in sorted(xla_flags.REMOVED))
    code = "from jaxlib import xla_client; xla_client.CompileOptions()"
    environ = dict(os.environ, XLA_FLAGS=flags)
    child = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert child.returncode != 0
    unknown = child.stderr.partition("Unknown flags in XLA_FLAGS: ")[2].splitlines()[0]
    assert {xla_flags.flag_name(flag) for flag in unknown.split()} == xla_flags.REMOVED


def test_removed_flag_is_refused_by_name():
    environ = {"XLA_FLAGS": "--xla_gpu_enable_triton_softmax_fusion=true --xla_gpu_autotune_level=0"}
    with pytest.raises(ConfigError, match="--xla_gpu_enable_triton_softmax_fusion: gone") as caught:
        xla_flags.prepare("cpu", environ=environ)
    assert "\n" not in str(caught.value)


def test_unknown_flag_and_bad_value_are_refused_by_a_child_process():
    with pytest.raises(ConfigError, match="does not accept: --xla_gpu_no_such_flag=1; remove") as caught:
        xla_flags.precheck(dict(os.environ, XLA_FLAGS="--xla_gpu_no_such_flag=1"))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="Couldn't interpret value perhaps for flag xla_gpu_deterministic_ops"):
        xla_flags.precheck(dict(os.environ, XLA_FLAGS="--xla_gpu_deterministic_ops=perhaps"))
    xla_flags.precheck(dict(os.environ, XLA_FLAGS="--xla_gpu_deterministic_ops=true"))


def test_flags_and_count_of_the_user_are_kept():
    child = run_child(
        "gpu_scan",
        2,
        XLA_FLAGS="--xla_gpu_enable_pipelined_all_gather=false --xla_force_host_platform_device_count=2",
        XLA_PYTHON_CLIENT_MEM_FRACTION="0.5",
    )
    assert child.returncode == 0, child.stderr
    applied, devices = child.stdout.splitlines()
    assert "pipelined_all_gather" not in applied
    assert "device_count" not in applied
    assert "MEM_FRACTION" not in applied
    assert "xla_gpu_enable_latency_hiding_scheduler=true" in applied
    assert devices.count("CpuDevice") == 2


def test_flags_in_a_file_are_read_and_kept(tmp_path):
    file = tmp_path / "flags.txt"
    file.write_text("--xla_force_host_platform_device_count=2\n--xla_cpu_collective_timeout_seconds=30\n")
    child = run_child("cpu", 2, XLA_FLAGS=str(file))
    assert child.returncode == 0, child.stderr
    applied, devices = child.stdout.splitlines()
    assert "xla_cpu_collective_timeout_seconds" not in applied
    assert devices.count("CpuDevice") == 2
    with pytest.raises(ConfigError, match="neither flags"):
        xla_flags.prepare("cpu", environ={"XLA_FLAGS": str(tmp_path / "missing")})


def test_late_call_changes_nothing():
    """JAX runs in the test process: the flags would come too late, so none is claimed to be applied."""
    import jax

    jax.devices()
    environ = {}
    assert xla_flags.prepare("cpu", 8, environ=environ) == ()
    assert environ == {}


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, None),
        ({"JAX_NUM_CPU_DEVICES": "-1"}, None),
        ({"JAX_NUM_CPU_DEVICES": "4"}, 4),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, 8),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_force_host_platform_device_count=2"}, 2),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_NUM_CPU_DEVICES": "8"}, 8),
    ],
)
def test_requested_device_count(environ, count):
    assert xla_flags.requested_device_count(environ) == count


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"JAX_NUM_CPU_DEVICES": "many"}, "JAX_NUM_CPU_DEVICES = 'many': expected an integer of at least 1"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=0"}, "device_count = '0': expected an integer"),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_NUM_CPU_DEVICES": "4"},
            "JAX_NUM_CPU_DEVICES = 4 but XLA_FLAGS --xla_force_host_platform_device_count = 8: set only one",
        ),
    ],
)
def test_requested_device_count_refuses(environ, message):
    with pytest.raises(ConfigError, match=message):
        xla_flags.requested_device_count(environ)


def test_count_that_differs_from_the_mesh_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="JAX_NUM_CPU_DEVICES gives 4 CPU devices, the mesh needs 8"):
        xla_flags.prepare("cpu", 8, environ={"JAX_NUM_CPU_DEVICES": "4"})


def test_platform_is_found_without_jax():
    assert xla_flags.default_platform({"JAX_PLATFORMS": "cpu"}) == "cpu"
    assert xla_flags.default_platform({"JAX_PLATFORMS": "cuda,cpu"}) == "gpu"
    code = "import sys; from ep_jax import xla_flags; xla_flags.default_platform(); assert 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_preset_is_refused():
    with pytest.raises(
        ConfigError, match="XLA preset 'tpu': allowed is one of cpu, gpu, gpu_scan, gpu_in_order, gpu_ragged"
    ):
        xla_flags.prepare("tpu", environ={})
