"""Where the time of a training step goes: the kernels of a trace by the phase of the model that they belong to.

A kernel is named after an instruction of the compiled program, and the program's text says from which named scopes of
the source each instruction came; of a fusion, its last operation counts. The innermost scope below is the phase. What
is differentiated twice over is told apart: `forward`, `recomputed` (rematerialised in the backward pass) and
`backward`. Collectives are listed by kind and not in their phases.

On GPUs times are of the first kernel's start to the last one's end, of one device at a time: some kernel runs, only a
collective runs (exposed), or none does (idle). On CPU all virtual devices share the threads: times are summed over
threads, shares are of that sum, and nothing can be said about idling.
"""

import dataclasses
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ep_jax.profiling import Event
from tools.bench.timing import is_kernel

MOE = ("router", "route", "dispatch", "experts", "combine", "premix", "latent", "shared_experts")
OPTIMIZER = "optimizer"  # all that is outside the model: clipping, updates, the finite check, router balancing
SCOPES = (*MOE, "attention", "loss", OPTIMIZER)
REST_OF_MODEL = "rest of the model"  # embedding, norms, residuals, microbatch sums
UNNAMED = "no scope"  # copies that the compiler put in, transfers to and from the host
PASSES = ("forward", "recomputed", "backward")
CONTROL_FLOW = re.compile(r"(while|conditional|call)(\.\d+)?$")  # last as long as what they run
INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?metadata=\{[^}]*?op_name="([^"]*)"', re.MULTILINE)
COLLECTIVES = {
    "ragged-all-to-all": r"ragged.all.to.all",
    "all-to-all": r"all.to.all|alltoall",
    "all-gather": r"all.?gather",
    "reduce-scatter": r"reduce.?scatter|psum_scatter",
    "all-reduce": r"all.?reduce|psum",
    "collective-permute": r"collective.?permute|ppermute",
    "other collective": r"nccl",
}


@dataclasses.dataclass(frozen=True)
class Phases:
    """Milliseconds of one step, means over the traced steps and, on GPUs, over devices."""

    by_phase: dict[str, dict[str, float]]  # phase -> pass -> kernel time
    collectives: dict[str, float]  # kind -> kernel time, hidden or not
    step: float  # GPU: from the first kernel to the last one; CPU: all operations, summed over threads
    exposed: float | None  # collectives while nothing else runs; None on CPU
    idle: float | None  # no kernel runs; None on CPU
    longest: list[dict[str, Any]]  # kernels of a phase and pass that take most time together

    def as_json(self) -> dict[str, Any]:
        whole = dataclasses.asdict(self)
        return {("longest" if name == "longest" else f"{name}_ms"): _rounded(value) for name, value in whole.items()}

    def table(self) -> str:
        """Milliseconds and share of the step, the largest phase first."""
        lines = [f"{'phase':<24}" + "".join(f"{name:>12}" for name in PASSES) + f"{'all ms':>12}{'% of step':>11}"]
        for phase, passes in sorted(self.by_phase.items(), key=lambda item: -sum(item[1].values())):
            lines.append(self._line(phase, [passes.get(name, 0.0) for name in PASSES], sum(passes.values())))
        for kind, ms in sorted(self.collectives.items(), key=lambda item: -item[1]):
            lines.append(self._line(kind, [None] * len(PASSES), ms))
        for name, ms in (("collectives, exposed", self.exposed), ("idle", self.idle), ("traced step", self.step)):
            if ms is not None:
                lines.append(self._line(name, [None] * len(PASSES), ms))
        return "\n".join(lines)

    def _line(self, name: str, passes: Sequence[float | None], ms: float) -> str:
        cells = "".join(f"{'':>12}" if part is None else f"{part:12.2f}" for part in passes)
        return f"{name:<24}{cells}{ms:12.2f}{100 * ms / self.step:11.1f}"


def scopes_of(program_text: str) -> dict[str, str]:
    """Instruction -> its op_name, from a compiled program's text (`compiled.as_text()`)."""
    return dict(INSTRUCTION.findall(program_text))


def phases_of(events: Iterable[Event], scopes: Mapping[str, str], steps: int) -> Phases:
    """Sorts the kernels of a trace of `steps` steps. events: with stats. Raises ValueError when there is no kernel."""
    events = list(events)
    kernels = [event for event in events if is_kernel(event)]
    on_gpu = bool(kernels)
    kernels = [e for e in kernels or events if on_gpu or "hlo_op" in e.stats]
    kernels = [e for e in kernels if not CONTROL_FLOW.match(str(e.stats.get("hlo_op", "")))]
    if not kernels:
        raise ValueError("the trace has no kernels: no step of a compiled program ran while it was taken")
    by_phase: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    collectives: dict[str, float] = defaultdict(float)
    longest: dict[tuple[str, str, str], float] = defaultdict(float)
    devices: dict[str, list[tuple[float, float, bool]]] = defaultdict(list)  # start, end, whether a collective
    shares = len({event.plane for event in kernels}) * steps if on_gpu else steps
    for event in kernels:
        operation = str(event.stats.get("hlo_op", ""))
        path = scopes.get(operation) or _path_in(event.stats)
        kind, ms = collective_of(event.name, operation), event.duration_ns / 1e6 / shares
        phase, which = (kind, "") if kind else phase_of(path)
        if kind:
            collectives[kind] += ms
        else:
            by_phase[phase][which] += ms
        longest[phase, which, event.name[:120]] += ms
        devices[event.plane].append((event.start_ns, event.start_ns + event.duration_ns, bool(kind)))
    step, exposed, idle = sum(longest.values()), None, None
    if on_gpu:
        timelines = [_timeline(kernels) for kernels in devices.values()]
        step, exposed, idle = (statistics.fmean(part) / steps for part in zip(*timelines, strict=True))
    ordered = sorted(longest.items(), key=lambda item: -item[1])[:40]
    return Phases(
        {phase: dict(passes) for phase, passes in by_phase.items()},
        dict(collectives),
        step,
        exposed,
        idle,
        [{"phase": p, "pass": w, "kernel": name, "ms": round(ms, 4)} for (p, w, name), ms in ordered],
    )


def phase_of(path: str) -> tuple[str, str]:
    """(phase, pass) of an operation by its op_name, e.g. jit(step)/shard_map/transpose(jvp(loss))/dot_general."""
    path = path.split(":")[0]  # operations that were merged: the first one's
    which = "recomputed" if "rematted_computation" in path else "backward" if "transpose(" in path else "forward"
    found = [word for word in re.findall(r"\w+", path) if word in SCOPES]
    if found:
        return found[-1], which
    if not path:
        return UNNAMED, "forward"
    return REST_OF_MODEL, which


def collective_of(kernel: str, operation: str) -> str | None:
    """The kind of collective by the instruction's name, else by NCCL's kernel; None for other kernels."""
    name = operation if operation and not CONTROL_FLOW.match(operation) else ""
    for text in (name, kernel if "nccl" in kernel.lower() else ""):
        for kind, pattern in COLLECTIVES.items():
            if text and re.search(pattern, text, re.IGNORECASE):
                return kind
    return None


def _path_in(stats: Mapping[str, Any]) -> str:
    """The op_name that a GPU's trace itself gives a kernel, if any."""
    return next((value for value in stats.values() if isinstance(value, str) and value.startswith("jit(")), "")


def _timeline(kernels: Sequence[tuple[float, float, bool]]) -> tuple[float, float, float]:
    """Milliseconds (first start to last end, only collectives run, nothing runs) of one device."""
    whole = max(end for _, end, _ in kernels) - min(start for start, _, _ in kernels)
    busy = _covered((start, end) for start, end, _ in kernels)
    computing = _covered((start, end) for start, end, is_collective in kernels if not is_collective)
    return whole / 1e6, (busy - computing) / 1e6, (whole - busy) / 1e6


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return round(value, 4) if isinstance(value, float) else value
