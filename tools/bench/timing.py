"""Device times of a compiled function, one number a call, and where the time went.

On GPUs calls are traced, one right after the other as in training, so that the GPU is as warm and as far behind its
host as it is there. A call lasts from its first kernel's start to its last one's end on the slowest device; calls are
told apart by counting kernels. With `paused` each call waits for the one before and for a pause: that flatters products
(by the GPU's higher clock) and costs what the devices wait for each other's hosts. Without a GPU, times are the host's,
and say so.
"""

import dataclasses
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ep_jax.profiling import Event, read_trace

PAUSE_S = 0.02
LEAD = 2  # traced calls that do not count: the devices start them at different times
KINDS = {
    "barrier": r"barrier",
    "exchange": r"nccl|sendrecv|alltoall|all-to-all",
    "matmul": r"gemm|cutlass|cublas|matmul|dot|nvjet|wgmma|grouped|weight_gradient",
    "copy": r"memcpy|memset|copy|concatenate|transpose|pad",
    "gather": r"gather|scatter|combine_rows|spread_rows",
    "index": r"sort|scan|cumsum|reduce-window|radix|searchsorted",
}


@dataclasses.dataclass(frozen=True)
class Times:
    """Milliseconds of each timed call."""

    ms: tuple[float, ...]
    source: str  # "device" or "host"
    # Kernel time of a call on the first device, by kind and by name, largest first; overlapping kernels count twice.
    by_kind_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    kernels_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    # Time in barriers by device: the one that waits least is the slowest.
    waiting_ms: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def low(self) -> float:
        """10th percentile."""
        return self._quantile(0.1)

    @property
    def high(self) -> float:
        """90th percentile."""
        return self._quantile(0.9)

    def as_json(self) -> dict[str, Any]:
        return {
            "median_ms": round(self.median, 4),
            "p10_ms": round(self.low, 4),
            "p90_ms": round(self.high, 4),
            "iterations": len(self.ms),
            "source": self.source,
            "by_kind_ms": {kind: round(ms, 4) for kind, ms in self.by_kind_ms.items()},
            "waiting_ms": {device: round(ms, 4) for device, ms in self.waiting_ms.items()},
        }

    def _quantile(self, share: float) -> float:
        ordered = sorted(self.ms)
        return ordered[round(share * (len(ordered) - 1))]


def measure(
    function: Callable[..., Any], *arguments: Any, iterations: int = 20, warmup: int = 3, paused: bool = False
) -> Times:
    """Times `iterations` calls after `warmup` ones that do not count."""
    for _ in range(warmup):
        jax.block_until_ready(function(*arguments))
    if jax.default_backend() != "gpu":
        return Times(tuple(_host_times(function, arguments, iterations)), "host")
    calls = LEAD + iterations
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            if paused:
                _host_times(function, arguments, calls, PAUSE_S)
            else:
                _run_ahead(function, arguments, calls)
        kernels = [event for event in read_trace(folder) if is_kernel(event)]
    told = calls_of(kernels, calls)
    if told is None:  # say so rather than guess
        pause_s = PAUSE_S if paused else 0.0
        return Times(tuple(_host_times(function, arguments, iterations, pause_s)), "host", *_totals(kernels, calls))
    counted = {plane: made[LEAD:] for plane, made in told.items()}
    timed = [event for made in counted.values() for call in made for event in call]
    return Times(tuple(spans_ms(counted)), "device", *_totals(timed, iterations))


def is_kernel(event: Event) -> bool:
    return event.plane.startswith("/device:GPU") and event.line.startswith("Stream")


def calls_of(kernels: Sequence[Event], calls: int) -> dict[str, list[list[Event]]] | None:
    """Each device's kernels by call; None if not every call ran the same kernels."""
    by_device: dict[str, list[Event]] = {}
    for event in sorted(kernels, key=lambda event: event.start_ns):
        by_device.setdefault(event.plane, []).append(event)
    told = {}
    for plane, events in by_device.items():
        size = len(events) // calls
        made = [events[first : first + size] for first in range(0, size * calls, size)] if size else []
        if size * calls != len(events) or len({tuple(sorted(event.name for event in call)) for call in made}) != 1:
            return None
        told[plane] = made
    return told or None


def spans_ms(told: dict[str, list[list[Event]]]) -> list[float]:
    """Milliseconds from a call's first kernel to its last, on the slowest device."""
    return [max(map(_span_ms, same_call)) for same_call in zip(*told.values(), strict=True)]


def _span_ms(call: Sequence[Event]) -> float:
    return (max(event.start_ns + event.duration_ns for event in call) - call[0].start_ns) / 1e6


def kind_of(name: str) -> str:
    """A kernel's kind by its name; what is none of them is elementwise."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "elementwise")


def _totals(kernels: Sequence[Event], calls: int) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """By kind and by name on the first device; what each device waited for the others."""
    by_kind: dict[str, float] = {}
    by_name: dict[str, float] = {}
    waiting = dict.fromkeys(sorted({event.plane for event in kernels}), 0.0)
    first = min(waiting, default="")
    for event in kernels:
        ms = event.duration_ns / 1e6 / calls
        if kind_of(event.name) == "barrier":
            waiting[event.plane] += ms
        if event.plane == first:
            by_kind[kind_of(event.name)] = by_kind.get(kind_of(event.name), 0.0) + ms
            by_name[event.name] = by_name.get(event.name, 0.0) + ms
    return by_kind, dict(sorted(by_name.items(), key=lambda item: -item[1])), waiting


def _run_ahead(function: Callable[..., Any], arguments: Sequence[Any], calls: int) -> None:
    """Launches all calls without waiting for one; each may drop its results as soon as the next is launched."""
    results = None
    for _ in range(calls):
        results = function(*arguments)
    jax.block_until_ready(results)


def _host_times(
    function: Callable[..., Any], arguments: Sequence[Any], calls: int, pause_s: float = 0.0
) -> list[float]:
    times = []
    for _ in range(calls):
        time.sleep(pause_s)
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(1e3 * (time.perf_counter() - began))
    return times
