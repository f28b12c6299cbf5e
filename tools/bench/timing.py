"""Device times of a compiled function, one number a call, and where the time went.

On GPUs each call is traced and its span is taken from the kernels: from the first kernel's start to the last one's end
on the slowest device, so that neither the host's launch time nor what the profiler does between calls counts. Calls are
told apart by pauses longer than any inside a call. Without a GPU, times are the host's, and say so.
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

PAUSE_S = 0.02  # between calls; the host sleeps so long that no gap inside a call is near it
GAP_NS = 8e6
KINDS = {
    "exchange": r"nccl|sendrecv|alltoall|all-to-all",
    "matmul": r"gemm|cutlass|cublas|matmul|dot|nvjet|wgmma|grouped",
    "copy": r"memcpy|memset|copy|concatenate|transpose|pad",
    "gather": r"gather|scatter|combine_rows|gather_rows",
    "index": r"sort|scan|cumsum|reduce-window|radix|searchsorted",
}


@dataclasses.dataclass(frozen=True)
class Times:
    """Milliseconds of each timed call."""

    ms: tuple[float, ...]
    source: str  # "device" or "host"
    by_kind_ms: dict[str, float]  # kernel time of a call on the first device, by kind; overlapping kernels count twice
    kernels_ms: dict[str, float]  # the same by kernel name, largest first

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
        }

    def _quantile(self, share: float) -> float:
        ordered = sorted(self.ms)
        return ordered[round(share * (len(ordered) - 1))]


def measure(function: Callable[..., Any], *arguments: Any, iterations: int = 20, warmup: int = 3) -> Times:
    """Times `iterations` calls after `warmup` ones that do not count."""
    for _ in range(warmup):
        jax.block_until_ready(function(*arguments))
    if jax.default_backend() != "gpu":
        return Times(tuple(_host_times(function, arguments, iterations)), "host", {}, {})
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            host = _host_times(function, arguments, iterations)
        kernels = [event for event in read_trace(folder) if is_kernel(event)]
    spans = call_spans(kernels, iterations)
    if spans is None:  # pauses and calls do not match: say so rather than guess
        return Times(tuple(host), "host", *_totals(kernels, iterations))
    return Times(tuple(spans), "device", *_totals(kernels, iterations))


def is_kernel(event: Event) -> bool:
    return event.plane.startswith("/device:GPU") and event.line.startswith("Stream")


def call_spans(kernels: Sequence[Event], iterations: int) -> list[float] | None:
    """Milliseconds from a call's first kernel to its last, on the slowest device; None if calls are not told apart."""
    by_device: dict[str, list[Event]] = {}
    for event in kernels:
        by_device.setdefault(event.plane, []).append(event)
    spans = []
    for events in by_device.values():
        events.sort(key=lambda event: event.start_ns)
        calls: list[list[float]] = []
        for event in events:
            end = event.start_ns + event.duration_ns
            if calls and event.start_ns - calls[-1][1] < GAP_NS:
                calls[-1][1] = max(calls[-1][1], end)
            else:
                calls.append([event.start_ns, end])
        if len(calls) != iterations:
            return None
        spans.append([(end - start) / 1e6 for start, end in calls])
    return [max(call) for call in zip(*spans, strict=True)] if spans else None


def kind_of(name: str) -> str:
    """A kernel's kind by its name; what is none of them is elementwise."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "elementwise")


def _totals(kernels: Sequence[Event], iterations: int) -> tuple[dict[str, float], dict[str, float]]:
    by_kind: dict[str, float] = {}
    by_name: dict[str, float] = {}
    first = min((event.plane for event in kernels), default="")
    for event in kernels:
        if event.plane == first:
            ms = event.duration_ns / 1e6 / iterations
            by_kind[kind_of(event.name)] = by_kind.get(kind_of(event.name), 0.0) + ms
            by_name[event.name] = by_name.get(event.name, 0.0) + ms
    return by_kind, dict(sorted(by_name.items(), key=lambda item: -item[1]))


def _host_times(function: Callable[..., Any], arguments: Sequence[Any], iterations: int) -> list[float]:
    times = []
    for _ in range(iterations):
        if jax.default_backend() == "gpu":
            time.sleep(PAUSE_S)
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(1e3 * (time.perf_counter() - began))
    return times
