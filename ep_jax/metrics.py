"""What a run tells its user while it trains: metric rows, throughput, the progress line, drops per layer.

Letters of array names: L layers, P stages (valid, sender, receiver as in `ep_jax.ep.drops`), E experts.

Counts are int32 per layer on the device and are added in int64 here, on the host; rates are always of sums, never means
of rates. Not here: where rows are written (`trackers.py`), FLOPs (`flops.py`), the loop that decides when to log.
Importing this file starts no JAX backend.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from ep_jax.fields import check, setting

METRICS = (
    "step",
    "loss",  # the training objective, all terms
    "cross_entropy",  # nats per valid target
    "grad_norm",  # before clipping
    "learning_rate",
    "tokens_per_second",  # valid targets, all devices
    "step_ms",
    "mfu",  # 0 to 1, all selected experts counted; null where the device's peak is unknown
    "mfu_kept",  # the same without dropped assignments
    "drop_rate",  # of valid assignments, 0 to 1
    "drop_rate_sender",
    "drop_rate_receiver",
    "tokens",  # valid targets since the first step of the run, resumed parts included
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """How often a run reports, and where besides metrics.jsonl."""

    SECTION: ClassVar[str] = "log"

    every: int = setting(10, at_least=1, unit="steps", doc="a metrics row and a progress line every so many steps")
    tensorboard: bool = setting(True, doc="write TensorBoard events into the run folder")
    drop_alarm: float = setting(
        0.0, at_least=0.0, at_most=1.0, doc="a warning line when more than this share of assignments drops; 0 = never"
    )
    wandb_project: str = setting("", doc="also log to this Weights & Biases project; empty = do not")

    def __post_init__(self):
        check(self)


class DelayedMetrics:
    """Holds each step's device metrics until the next step has been launched, so the host never waits for that one.

    Call `push` right after launching a step; it returns the step before, on the host, in the time the device works on
    the new one. Call `flush` before a checkpoint is saved (rows up to the saved step must exist when a run resumes from
    it), before evaluation and at the end.
    """

    def __init__(self):
        self.held: tuple[int, Any] | None = None

    def push(self, step: int, metrics: Any) -> tuple[int, Any] | None:
        """Takes a tree of device arrays, replicated over processes; returns (step, NumPy tree) of the previous one."""
        for leaf in jax.tree.leaves(metrics):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        previous = self.flush()
        self.held = (step, metrics)
        return previous

    def flush(self) -> tuple[int, Any] | None:
        """Waits for and returns the step that is held, None when there is none."""
        held, self.held = self.held, None
        return None if held is None else (held[0], jax.device_get(held[1]))


class StepClock:
    """Time and tokens per step: the median of the last `window` steps, without the first ones that compile.

    A step's time is the time between two calls of `tick`. The first `warmup_steps` steps of this process count nowhere,
    nor does what lies between `pause` and the next tick (evaluation, a checkpoint).
    """

    def __init__(self, *, warmup_steps: int = 2, window: int = 50, now: Callable[[], float] = time.perf_counter):
        self.now, self.window, self.to_skip = now, window, max(warmup_steps, 1)
        self.last: float | None = None
        self.steps: list[tuple[float, int]] = []  # seconds, tokens

    def tick(self, tokens: int) -> None:
        """One more step with `tokens` valid targets over all devices has finished."""
        now = self.now()
        if self.to_skip:
            self.to_skip -= 1
        elif self.last is not None:
            self.steps = [*self.steps, (now - self.last, tokens)][-self.window :]
        self.last = now

    def pause(self) -> None:
        """The time until the next tick is not a step's."""
        self.last = None

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step; None before the first one counts."""
        return statistics.median(seconds for seconds, _ in self.steps) if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Mean tokens of a step over its median time; None before the first step counts."""
        if not self.step_seconds:
            return None
        return statistics.fmean(tokens for _, tokens in self.steps) / self.step_seconds


def total_drops(counts_LPE: Any) -> np.ndarray:
    """int64 [P]: valid assignments, sender drops and receiver drops, over all layers and experts."""
    return np.asarray(counts_LPE).sum(axis=(0, 2), dtype=np.int64)


def drop_rates(counts_LPE: Any) -> dict[str, float]:
    """The three drop-rate metrics from the counts of all layers; 0 when nothing is valid."""
    valid, sender, receiver = (int(count) for count in total_drops(counts_LPE))
    return {
        "drop_rate": (sender + receiver) / max(valid, 1),
        "drop_rate_sender": sender / max(valid, 1),
        "drop_rate_receiver": receiver / max(valid, 1),
    }


def add_drops(total_LPE: np.ndarray | None, counts_LPE: Any) -> np.ndarray:
    """Running sum over steps in int64; None starts one."""
    counts_LPE = np.asarray(counts_LPE).astype(np.int64)
    return counts_LPE if total_LPE is None else total_LPE + counts_LPE


def drop_table(counts_LPE: Any) -> str:
    """Table of a run's drops: one line a layer and one for all, with the expert that lost the largest share."""
    counts_LPE = np.asarray(counts_LPE).astype(np.int64)
    lines = [f"{'layer':>5}  {'valid':>15}  {'dropped %':>9}  {'sender %':>8}  {'receiver %':>10}  worst expert %"]
    for layer, counts_PE in enumerate(counts_LPE):
        dropped_E = (counts_PE[1] + counts_PE[2]) / np.maximum(counts_PE[0], 1)
        worst = int(dropped_E.argmax())
        lines.append(f"{layer:>5}  {_drop_columns(counts_PE.sum(1))}  {100 * dropped_E[worst]:6.2f} (expert {worst})")
    lines.append(f"{'all':>5}  {_drop_columns(total_drops(counts_LPE))}")
    return "\n".join(lines)


def _drop_columns(counts_P: np.ndarray) -> str:
    valid, sender, receiver = (int(count) for count in counts_P)
    rates = [100 * count / max(valid, 1) for count in (sender + receiver, sender, receiver)]
    return f"{valid:>15,}  {rates[0]:>9.3f}  {rates[1]:>8.3f}  {rates[2]:>10.3f}"


def metrics_row(**values: Any) -> dict[str, Any]:
    """A row of metrics.jsonl: METRICS in order, then further scalars. Raises ValueError when a metric is missing."""
    missing = [name for name in METRICS if name not in values]
    if missing:
        raise ValueError(f"metrics row lacks {', '.join(missing)}")
    return {name: plain(values[name]) for name in (*METRICS, *(name for name in values if name not in METRICS))}


def plain(value: Any) -> Any:
    """A value as JSON has it: NumPy and 0-d arrays as numbers, anything not finite as None."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def progress_line(row: Mapping[str, Any], num_steps: int) -> str:
    """One row as a line of at most 120 columns: step/total, %, loss, drops, speed, utilisation, time left."""
    step, step_ms, speed, used = row["step"], row["step_ms"], row["tokens_per_second"], row["mfu"]
    total, sender, receiver = (100 * row[f"drop_rate{stage}"] for stage in ("", "_sender", "_receiver"))
    parts = (
        f"step {step:>{len(str(num_steps))}}/{num_steps}",
        f"{100 * step / num_steps:3.0f}%",
        f"loss {row['loss']:.4f}" if row["loss"] is not None else "loss not finite",
        f"drop {total:.2f}% ({sender:.2f} send, {receiver:.2f} recv)",
        "- tok/s" if speed is None else f"{short_number(speed)} tok/s",
        "MFU -" if used is None else f"MFU {100 * used:.1f}%",
        "ETA -" if step_ms is None else f"ETA {short_time((num_steps - step) * step_ms / 1e3)}",
    )
    return "  ".join(parts)


def short_number(value: float) -> str:
    """A count in at most five characters: 950, 12.3k, 4.56M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:  # what would round to 1000 of the smaller unit
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def short_time(seconds: float) -> str:
    """A duration as its two largest units: 42s, 3m05s, 2h10m, 4d03h."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"
