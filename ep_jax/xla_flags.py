"""XLA flags and the environment variables that steer JAX: read, checked and set here, before JAX starts.

An XLA flag that the installed jaxlib does not know kills the process before Python can say why, so our own flags are
frozen presets per JAX version, and flags of the user are checked first. This module imports no JAX. It does not start a
backend, and it never overrides what the user has set.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from ep_jax.fields import ConfigError

DEVICE_COUNT_FLAG = "xla_force_host_platform_device_count"
DEVICE_COUNT_VARIABLE = "JAX_NUM_CPU_DEVICES"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """XLA flags and environment variables that were tried with one JAX minor version."""

    name: str
    jax: str
    flags: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


# Every flag below is accepted by jaxlib 0.11.2 (tests/test_xla_flags.py runs each preset in a process of its own).
PRESETS = (
    Preset(
        name="cpu",
        jax="0.11",
        flags=(
            # Many virtual devices on few cores reach a collective at very different times. The default of 40 s, after
            # which XLA ends the process, is too short for a busy machine.
            "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
            "--xla_cpu_collective_call_terminate_timeout_seconds=600",
            "--xla_cpu_collective_timeout_seconds=600",
        ),
    ),
    Preset(
        name="gpu",
        jax="0.11",
        # Overlap weight gathers and gradient reductions of the fsdp axis with compute.
        flags=("--xla_gpu_enable_latency_hiding_scheduler=true",),
        environment=(("XLA_CLIENT_MEM_FRACTION", "0.9"),),
    ),
    Preset(
        name="gpu_scan",
        jax="0.11",
        flags=(
            "--xla_gpu_enable_latency_hiding_scheduler=true",
            # Overlap across the turns of a loop over layers. Each flag takes a turn out of a loop that has such a
            # collective: for configs/h200.toml on two GPUs with scanned layers 1.6 GiB and half as much compiling more.
            # Where the batch comes in parts, that loop is taken apart too: 41 GiB more, and twice the compiling. With
            # unrolled layers the whole step then stands twice in the program (experiments/LOG.md, "compiled twice").
            "--xla_gpu_enable_pipelined_all_gather=true",
            "--xla_gpu_enable_pipelined_reduce_scatter=true",
            "--xla_gpu_enable_pipelined_all_reduce=true",
        ),
        environment=(("XLA_CLIENT_MEM_FRACTION", "0.9"),),
    ),
    Preset(
        name="gpu_in_order",
        jax="0.11",
        flags=(
            "--xla_gpu_enable_latency_hiding_scheduler=true",
            # Beside a persistent kernel an exchange holds multiprocessors while it waits for its peer, and the kernel's
            # blocks there begin when it is through. Where exchanges are short (slots of tokens) that costs more than it
            # hides: at bench shape B 23.3 ms a layer on 2 H200 (a tenth of the calls below 19.8, a tenth above 23.8),
            # on another pair in order 20.8 (20.5, 20.9); experiments/LOG.md.
            "--xla_gpu_disable_async_collectives=ALLTOALL",
        ),
        environment=(("XLA_CLIENT_MEM_FRACTION", "0.9"),),
    ),
    Preset(
        name="gpu_ragged",
        jax="0.11",
        flags=(
            # Wrong gradients were reported for ragged_all_to_all with the scheduler on and collectives overlapping.
            "--xla_gpu_enable_latency_hiding_scheduler=false",
            "--xla_gpu_experimental_parallel_collective_overlap_limit=1",
            # On 2 H200 (JAX 0.11.2) a step with ragged_all_to_all in a command buffer ends in "NCCL operation failed:
            # operation not supported"; without command buffers it runs.
            "--xla_gpu_enable_command_buffer=",
        ),
        environment=(("XLA_CLIENT_MEM_FRACTION", "0.9"),),
    ),
)

# Command buffers (CUDA graphs) hide which phase a kernel belongs to; a traced run does without them.
PROFILING_FLAGS = ("--xla_gpu_enable_command_buffer=",)

# Flags of old recipes that end the process at start with JAX 0.11.
REMOVED = frozenset(
    {
        "xla_gpu_all_reduce_contiguous",
        "xla_gpu_cudnn_gemm_fusion",
        "xla_gpu_enable_address_computation_fusion",
        "xla_gpu_enable_async_all_gather",
        "xla_gpu_enable_async_all_reduce",
        "xla_gpu_enable_async_collectives",
        "xla_gpu_enable_custom_fusions",
        "xla_gpu_enable_triton_softmax_fusion",
        "xla_gpu_experimental_enable_nvshmem",
        "xla_gpu_experimental_ragged_all_to_all_zero_copy",
        "xla_gpu_experimental_triton_ragged_dot",
        "xla_gpu_graph_level",
        "xla_gpu_lhs_enable_gpu_async_tracker",
        "xla_gpu_simplify_all_fp_conversions",
    }
)

# Set together, jaxlib refuses: the older name of a variable counts as the user's choice of the newer one.
OLDER_NAMES = {"XLA_CLIENT_MEM_FRACTION": "XLA_PYTHON_CLIENT_MEM_FRACTION"}


def prepare(
    preset: str,
    num_cpu_devices: int | None = None,
    *,
    profiling: bool = False,
    environ: MutableMapping[str, str] = os.environ,
) -> tuple[str, ...]:
    """Checks the user's XLA flags and adds ours that the user has not set; call it before JAX starts.

    `preset` is "cpu", "gpu", "gpu_scan" (layers in the one loop), "gpu_in_order" (short exchanges) or "gpu_ragged";
    `num_cpu_devices` is the number of CPU devices of this process (None: not set here); `profiling` makes GPU traces
    name their phases. Returns what was added, one "NAME=value" each, to be printed and stored in the run folder; empty
    when a backend of JAX is running already: XLA reads its flags only once.

    Raises ConfigError for a removed or unknown flag, and for a device count that differs from the one asked for.
    """
    flags = find_preset(preset).flags + (PROFILING_FLAGS if profiling and preset != "cpu" else ())
    environment = find_preset(preset).environment
    check_removed(environ)
    requested = requested_device_count(environ)
    if None not in (requested, num_cpu_devices) and requested != num_cpu_devices:
        source = _device_count_source(environ)
        raise ConfigError(f"{source} gives {requested} CPU devices, the mesh needs {num_cpu_devices} in this process")
    if backend_started():
        return ()
    if jax_version() != find_preset(preset).jax:
        warnings.warn(f"no XLA flags are added: the presets were tried with JAX {PRESETS[0].jax}", stacklevel=2)
        flags, environment = (), ()
    precheck(environ)
    if requested is None and num_cpu_devices is not None:
        flags += (f"--{DEVICE_COUNT_FLAG}={num_cpu_devices}",)

    set_by_user = {name for name, _ in parse_flags(environ)}
    new_flags = tuple(flag for flag in flags if flag_name(flag) not in set_by_user)
    new_variables = tuple((name, value) for name, value in environment if not _is_set(name, environ))
    if new_flags:
        environ["XLA_FLAGS"] = " ".join((flags_text(environ), *new_flags)).strip()
    environ.update(new_variables)
    return tuple(flag.removeprefix("--") for flag in new_flags) + tuple(f"{k}={v}" for k, v in new_variables)


def default_platform(environ: Mapping[str, str] = os.environ) -> str:
    """ "cpu" or "gpu": what JAX will run on, found without starting it."""
    wanted = environ.get("JAX_PLATFORMS", "").split(",")[0].strip().lower()
    if wanted:
        return "gpu" if wanted in ("gpu", "cuda") else wanted
    plugin = any(importlib.util.find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"))
    return "gpu" if plugin and Path("/dev/nvidiactl").exists() else "cpu"


def requested_device_count(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number of CPU devices the environment asks for, or None when it asks for none.

    Raises ConfigError when the two ways to ask disagree (JAX would follow JAX_NUM_CPU_DEVICES without a word), or when
    the value is no positive integer.
    """
    counts = {}
    if environ.get(DEVICE_COUNT_VARIABLE, "-1") != "-1":
        counts[DEVICE_COUNT_VARIABLE] = environ[DEVICE_COUNT_VARIABLE]
    for name, value in parse_flags(environ):
        if name == DEVICE_COUNT_FLAG:
            counts[f"XLA_FLAGS --{DEVICE_COUNT_FLAG}"] = value
    for source, text in counts.items():
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{source} = {text!r}: expected an integer of at least 1")
    if len({int(text) for text in counts.values()}) > 1:
        raise ConfigError(" but ".join(f"{source} = {text}" for source, text in counts.items()) + ": set only one")
    return int(next(iter(counts.values()))) if counts else None


def check_removed(environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError naming the flags in XLA_FLAGS that are known to end the process."""
    removed = sorted({name for name, _ in parse_flags(environ)} & REMOVED)
    if removed:
        raise ConfigError(f"XLA_FLAGS has --{', --'.join(removed)}: gone from XLA, would end the process; remove it")


def precheck(environ: Mapping[str, str] = os.environ, timeout_s: float = 60.0) -> None:
    """Lets a child process parse XLA_FLAGS when it has flags that no preset knows; costs about 0.3 s then.

    Raises ConfigError naming the flags the installed jaxlib does not accept.
    """
    known = {flag_name(flag) for preset in PRESETS for flag in preset.flags + PROFILING_FLAGS} | {DEVICE_COUNT_FLAG}
    if {name for name, _ in parse_flags(environ)} <= known:
        return
    code = "from jaxlib import xla_client; xla_client.CompileOptions()"
    child = subprocess.run(
        [sys.executable, "-c", code], env=dict(environ), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if child.returncode == 0:
        return
    found = re.search(r"Unknown flags? in XLA_FLAGS: (.*)|(Couldn't interpret value .*)", child.stderr)
    complaint = (found.group(1) or found.group(2)) if found else f"parsing ended with exit code {child.returncode}"
    version = importlib.metadata.version("jaxlib")
    raise ConfigError(f"XLA_FLAGS: jaxlib {version} does not accept: {complaint.strip()}; remove or correct it")


def find_preset(name: str) -> Preset:
    """The preset of that name. Raises ConfigError naming the presets there are."""
    for preset in PRESETS:
        if preset.name == name:
            return preset
    raise ConfigError(f"XLA preset {name!r}: allowed is one of {', '.join(preset.name for preset in PRESETS)}")


def parse_flags(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """(name, value) of every flag in XLA_FLAGS, in order; value is "" for a bare --name."""
    return re.findall(r"(?:^|\s)--(\w+)(?:=(\S*))?", flags_text(environ))


def flags_text(environ: Mapping[str, str] = os.environ) -> str:
    """XLA_FLAGS as text; like XLA itself, a value that does not begin with "-" is the name of a file with the flags."""
    text = environ.get("XLA_FLAGS", "").strip()
    if not text or text.startswith("-"):
        return text
    try:
        return Path(text).read_text().strip()
    except OSError as error:
        raise ConfigError(f"XLA_FLAGS = {text!r}: neither flags (they begin with --) nor a readable file") from error


def flag_name(flag: str) -> str:
    """The name in "--name=value"."""
    return flag.removeprefix("--").partition("=")[0]


def jax_version() -> str:
    """Major and minor version of the installed JAX, e.g. "0.11", without importing it."""
    return ".".join(importlib.metadata.version("jax").split(".")[:2])


def backend_started() -> bool:
    """True once JAX has started a backend in this process: flags come too late then."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def relevant_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that change what JAX, XLA, CUDA or NCCL do, for the run folder."""
    prefixes = ("XLA_", "JAX_", "NCCL_", "CUDA_", "NVSHMEM_", "EP_JAX_")
    return {name: environ[name] for name in sorted(environ) if name.startswith(prefixes)}


def _is_set(name: str, environ: Mapping[str, str]) -> bool:
    return name in environ or OLDER_NAMES.get(name) in environ


def _device_count_source(environ: Mapping[str, str]) -> str:
    return DEVICE_COUNT_VARIABLE if DEVICE_COUNT_VARIABLE in environ else f"XLA_FLAGS --{DEVICE_COUNT_FLAG}"
