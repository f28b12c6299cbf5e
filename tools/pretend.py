"""Hopper GPUs that are not there: devices that JAX traces and compiles for, and that run nothing.

JAX's CUDA plugin holds the compiler and all it asks of a GPU, given a description of one. The process stays on the CPU,
also beside real GPUs. Traced code asks JAX, jax-triton and tokamax what GPU they are on; while `pretended` is open they
answer with the described ones. What is compiled, and for which configuration, is not said here.
"""

import contextlib
import importlib.util
import os
from collections.abc import Generator
from typing import Any
from unittest import mock

from ep_jax import xla_flags
from ep_jax.fields import ConfigError
from ep_jax.planning.hardware import GIGA, Hardware

MEMORY_BANDWIDTH = {"NVIDIA H100": 3.35e12, "NVIDIA H200": 4.8e12}  # bytes/s, of the data sheets; the kinds known here
COMPUTE_CAPABILITY = (9, 0)  # of all of them, and what the kernels are written for
# Every H100 and H200 SXM. Names are those of XLA's GpuTargetConfigProto, in text form.
HOPPER = """
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
"""
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")  # either


def check_packages() -> None:
    """Raises ConfigError, saying what to install, where a package is missing that holds a compiler."""
    missing = [] if any(map(importlib.util.find_spec, PLUGINS)) else [PLUGINS[0]]
    missing += [] if importlib.util.find_spec("jax_triton") else ["jax_triton"]
    if missing:
        raise ConfigError(f"compiling for GPUs: {', '.join(missing)} not installed: pip install 'ep-jax[cuda]'")


def check_hardware(hardware: Hardware) -> None:
    """Raises ConfigError for a kind of GPU that is not described here."""
    if hardware.device_kind not in MEMORY_BANDWIDTH:
        raise ConfigError(
            f"hardware.device_kind = {hardware.device_kind!r}: the kernels need compute capability 9.0; allowed here "
            f"is {' or '.join(MEMORY_BANDWIDTH)}, as in h100_8 and h200_8"
        )


def memory_fraction(hardware: Hardware) -> float:
    """What JAX may take of a GPU's memory: of the environment, where the preset has put it, else of the hardware."""
    environment = xla_flags.relevant_environment()
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        try:
            if name in environment:
                return float(environment[name])
        except ValueError:
            raise ConfigError(f"{name} = {environment[name]!r}: expected a number") from None
    return hardware.memory_fraction


def stay_on_cpu() -> None:
    """No GPU of this machine is started or asked in this process; call it before JAX starts a backend."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    import jax

    jax.config.update("jax_platforms", "cpu")  # also spares the plugin its search for a driver
    jax.config.update("jax_enable_compilation_cache", False)  # seconds would be those of a file


def usable_bytes(hardware: Hardware) -> int:
    """What JAX may take of one GPU's memory."""
    return int(hardware.memory_gb * GIGA * memory_fraction(hardware))


def target_config(hardware: Hardware) -> str:
    """The description of one such GPU that XLA compiles for."""
    major, minor = COMPUTE_CAPABILITY
    # What XLA schedules and rematerializes for: on a GPU JAX tells it what it may take, here it takes 80 % of this.
    memory = usable_bytes(hardware) * 100 // 80
    return (
        f"gpu_device_info {{{HOPPER}"
        f"  memory_bandwidth: {int(MEMORY_BANDWIDTH[hardware.device_kind])}\n"
        f"  device_memory_size: {memory}\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n"
        "}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 }\n"
        "runtime_version { major: 13 }\n"
        f'device_description_str: "{hardware.device_kind}"\n'
    )


@contextlib.contextmanager
def pretended(hardware: Hardware, num_devices: int) -> Generator[list[Any]]:
    """`num_devices` GPUs of one process and one NVLink domain, which JAX and the kernels' packages take for real ones.

    Call `check_packages`, `check_hardware` and `stay_on_cpu` first. Raises ConfigError where the plugin does not work.
    """
    import jax
    import jax.extend.backend
    from jax.experimental import topologies

    try:
        import jax_triton.triton_lib

        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target_config(hardware), topology=f"1x1x{num_devices}"
        )
    except (ImportError, NotImplementedError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"compiling for GPUs: JAX's CUDA plugin does not work here: {reason}") from None
    devices = list(topology.devices)
    major, minor = COMPUTE_CAPABILITY
    answers = (
        (jax, "default_backend", lambda: "gpu"),
        (jax, "devices", lambda *_: devices),
        (jax.extend.backend, "get_default_device", lambda: devices[0]),  # tokamax
        (jax_triton.triton_lib.triton_kernel_call_lib, "get_compute_capability", lambda _: 10 * major + minor),
    )
    with contextlib.ExitStack() as stack:
        for module, name, answer in answers:
            stack.enter_context(mock.patch.object(module, name, answer))
        yield devices
