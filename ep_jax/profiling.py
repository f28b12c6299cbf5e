"""XProf traces of a few steps, how to read them back, and the description of the machine a run is on.

`Profiler` starts and stops JAX's profiler around a window of steps; `read_trace` lists what a trace holds. Not here:
metrics (metrics.py) and the phases' named scopes, which the model and the protocol set themselves.
"""

import dataclasses
import importlib.metadata
import platform
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from ep_jax import xla_flags
from ep_jax.fields import ConfigError, check, setting

STEP_NAME = "train_step"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "ep-jax")
GPU_PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "tokamax", "jax-triton", "triton", "nvidia-nccl-cu13")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps of this run are traced."""

    SECTION: ClassVar[str] = "profile"

    steps: str = setting(
        "",
        unit="steps",
        doc='"a:b" traces steps a to b-1, counted from the first step of this run (also after a resume); "" = none',
    )

    def __post_init__(self):
        check(self)
        parse_window(self.steps)


def parse_window(steps: str) -> tuple[int, int]:
    """From "a:b" (a, b), from "" (0, 0). Raises ConfigError unless 0 <= a < b."""
    if not steps:
        return 0, 0
    begin, colon, end = steps.partition(":")
    if not (colon and begin.isdecimal() and end.isdecimal() and int(begin) < int(end)):
        raise ConfigError(f'profile.steps = {steps!r}: expected "a:b" with 0 <= a < b, or "" for no trace')
    return int(begin), int(end)


class Profiler:
    """Traces the window of `config` into `run_folder`/profile/process_N; without a window it leaves no folder.

    `first_step` and `last_step` are the numbers of the first and of the last step of this run, both included: after a
    resume at step 100, "2:4" traces steps 102 and 103. Use as a context manager, so that a run that ends early closes
    its trace:

        with Profiler(config.profile, folder, first_step, last_step) as profiler:
            for step in range(first_step, last_step + 1):
                with profiler.at_step(step):
                    state = train_step(state)

    Warns, with the numbers, when the window lies outside the run or is cut by its end.
    """

    def __init__(self, config: ProfileConfig, run_folder: str | Path, first_step: int, last_step: int):
        begin, end = parse_window(config.steps)
        self.folder = Path(run_folder) / "profile"
        self.begin, self.end = first_step + begin, first_step + end
        self.last_step = last_step
        self.tracing = False
        if begin < end and self.end > last_step + 1:
            what = "no step is" if self.begin > last_step else "fewer steps are"
            warnings.warn(
                f"profile.steps = {config.steps!r} means steps {self.begin} to {self.end - 1}, this run has steps "
                f"{first_step} to {last_step}: {what} traced",
                stacklevel=2,
            )

    def at_step(self, step: int) -> AbstractContextManager[Any]:
        """Starts or stops the trace where the window begins or ends; returns the context in which to run the step.

        The step is launched, not finished, inside the context. Only at the two ends of the window does the host wait
        for the devices, so that the trace holds whole steps.
        """
        import jax

        if self.tracing and step >= self.end:
            self.close()
        if not self.tracing and self.begin <= step < self.end and step <= self.last_step:
            _wait_for_devices()
            folder = self.folder / f"process_{jax.process_index()}"  # files are named after the host only
            folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(folder)
            self.tracing = True
        return jax.profiler.StepTraceAnnotation(STEP_NAME, step_num=step)

    def close(self) -> None:
        """Writes the trace, if one is running; safe to call again."""
        if not self.tracing:
            return
        import jax

        self.tracing = False
        _wait_for_devices()
        jax.profiler.stop_trace()

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """One event of a trace."""

    plane: str  # a device or a host, e.g. "/host:CPU", "/device:GPU:0"
    line: str  # a thread or a stream
    name: str
    start_ns: float
    duration_ns: float
    stats: dict[str, Any]  # e.g. step_num of a step, or the named scopes of a GPU kernel; empty unless asked for


def trace_files(path: str | Path) -> list[Path]:
    """The .xplane.pb files of a trace: `path` is such a file, or a folder with some at any depth; oldest first."""
    path = Path(path)
    return [path] if path.is_file() else sorted(path.rglob("*.xplane.pb"))


def read_trace(path: str | Path, *, with_stats: bool = False) -> list[Event]:
    """Every event of a trace file, or of all traces below a folder. Raises FileNotFoundError when there is none."""
    from jax.profiler import ProfileData

    files = trace_files(path)
    if not files:
        raise FileNotFoundError(f"no .xplane.pb file at {path}")
    return [
        Event(
            plane=plane.name,
            line=line.name,
            name=event.name,
            start_ns=event.start_ns,
            duration_ns=event.duration_ns,
            stats=dict(event.stats) if with_stats else {},
        )
        for file in files
        for plane in ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
    ]


def device_description() -> dict[str, Any]:
    """What the run runs on, as JSON values for the run folder: devices, versions, flags. Starts JAX's backend."""
    import jax

    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "devices_per_process": jax.local_device_count(),
        "processes": jax.process_count(),
        "device_memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "platform_version": device.client.platform_version,
        "driver": _nvidia_driver(),
        "host": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES + GPU_PACKAGES if (version := _version(name))},
        "environment": xla_flags.relevant_environment(),
    }


def _wait_for_devices() -> None:
    """Blocks until every local device has finished what was launched."""
    import jax

    jax.effects_barrier()
    for array in jax.live_arrays():
        if not array.is_deleted():
            array.block_until_ready()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_driver() -> str | None:
    """The first line of the kernel driver's version file; None where there is no such driver."""
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0] if file.exists() else None
