"""Turns finished steps into metric rows, progress lines, drop totals and the run's final report.

Letters: N layers, P stages (valid, sender, receiver), E experts, D source shards. Works on host copies of a step's
metrics, one step behind the device. Not here: the formats of rows and lines (metrics.py) and their files (trackers.py).
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ep_jax import drop_report, flops
from ep_jax.evaluation import Evaluation
from ep_jax.launch import Runtime
from ep_jax.metrics import StepClock, add_drops, drop_rates, metrics_row, progress_line
from ep_jax.step import StepMetrics
from ep_jax.trackers import ARRAYS_FOLDER, ArrayFiles, JsonLines, Tracker, open_tracker

SUMMARY_FILE = "summary.json"
EVALUATIONS_FILE = "evaluations.jsonl"
DEVICES_FILE = "devices.json"


class NonFiniteError(RuntimeError):
    """Loss or gradients of a step were not finite; the message names the step and the first leaf."""


class Report:
    """What a run tells while it trains. Rows are logged every `log.every` steps and at the last one."""

    def __init__(self, runtime: Runtime, *, first_step: int, totals: dict[str, Any]):
        """totals: what `totals` returned at the checkpoint the run goes on from, {} for a new run."""
        config = runtime.config
        device = jax.devices()[0]
        self.runtime, self.config = runtime, config
        self.tokens: int = totals.get("tokens", 0)
        drops = totals.get("drops_NPE")
        self.drops_NPE = None if drops is None else np.asarray(drops, np.int64)
        self.flops = flops.flops_per_token(config.model, config.router, config.data.sequence_length)
        self.peak = flops.device_peak_flops(device.device_kind, config.model.compute_dtype)
        self.clock = StepClock()
        self.first_step = first_step
        self.startup: dict[str, Any] = {}  # of this process: time to its first step, and what compiling took of it
        self.tracker: Tracker | None = None
        self.arrays: ArrayFiles | None = None
        self.evaluations: JsonLines | None = None

    @property
    def is_open(self) -> bool:
        return self.tracker is not None

    def open(self) -> None:
        """Opens the files in the run folder; rows after the first step are removed from what an earlier run left."""
        where = dict(resumed_step=self.first_step, process_index=jax.process_index())
        config = self.config
        self.arrays = ArrayFiles(config.folder / ARRAYS_FOLDER, **where)
        self.tracker = open_tracker(config.log, config.folder, run_config=dataclasses.asdict(config), **where)
        if self.runtime.is_main:
            self.evaluations = JsonLines(config.folder / EVALUATIONS_FILE, self.first_step)

    @property
    def totals(self) -> dict[str, Any]:
        """Sums since step 0, JSON values for a checkpoint's metadata."""
        return {"tokens": self.tokens, "drops_NPE": None if self.drops_NPE is None else self.drops_NPE.tolist()}

    def step_done(self, finished: tuple[int, StepMetrics] | None) -> None:
        """Takes a finished step's host metrics. Raises NonFiniteError when they are not finite."""
        if finished is None:
            return
        step, metrics = finished
        refuse_non_finite(step, metrics)
        if not metrics.valid_targets:
            self.runtime.say(f"WARNING: step {step}: no valid target in its batch; loss 0 and zero gradients")
        self.clock.tick(int(metrics.valid_targets))
        self.tokens += int(metrics.valid_targets)
        self.drops_NPE = add_drops(self.drops_NPE, metrics.drops.counts_NPE)
        if step % self.config.log.every == 0 or step == self.config.train.steps or step == 1:
            self._log(step, metrics)

    def _log(self, step: int, metrics: StepMetrics) -> None:
        speed, seconds = self.clock.tokens_per_second, self.clock.step_seconds
        rates = drop_rates(metrics.drops.counts_NPE)
        used = None if speed is None else flops.mfu(speed, self.flops, self.peak, jax.device_count())
        lost = metrics.drops.weights_NP.sum(axis=0)
        row = metrics_row(
            step=step,
            loss=metrics.loss,
            cross_entropy=metrics.cross_entropy,
            grad_norm=metrics.grad_norm,
            learning_rate=metrics.learning_rate,
            tokens_per_second=speed,
            step_ms=None if seconds is None else 1e3 * seconds,
            mfu=used,
            mfu_kept=flops.mfu_kept(used, self.flops, rates["drop_rate"]),
            **rates,
            tokens=self.tokens,
            load_balance=metrics.load_balance,
            z_loss=metrics.z_loss,
            lost_weight_sender=float(lost[1] / lost[0]) if lost[0] > 0 else 0.0,
            lost_weight_receiver=float(lost[2] / lost[0]) if lost[0] > 0 else 0.0,
            peak_memory_bytes=peak_memory_bytes(),
            **drop_report.scalars(metrics.drops._asdict()),
        )
        assert self.tracker, "open() comes before the first finished step"
        assert self.arrays
        self.tracker.log(step, {name: value for name, value in row.items() if name != "step"})
        self.arrays.write(step, metrics.drops._asdict())
        if warning := drop_report.alarm(step, metrics.drops.counts_NPE, self.config.log.drop_alarm):
            self.runtime.say(warning)
        self.runtime.say(progress_line(row, self.config.train.steps))

    def log_evaluation(self, step: int, held_out: Evaluation) -> None:
        """One line, and one JSON object in evaluations.jsonl: metrics.jsonl holds training steps only."""
        self.runtime.say(f"step {step}: held-out cross entropy {held_out.cross_entropy:.4f} as trained")
        if self.evaluations is not None:
            self.evaluations.log(step, held_out.as_json())

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes summary.json and closes the trackers."""
        summary = {**summary, "tokens_per_second": self.clock.tokens_per_second, "totals": self.totals}
        summary["startup"] = self.startup
        if self.runtime.is_main:
            write_json(self.config.folder / SUMMARY_FILE, summary)
        self.close({name: value for name, value in summary.items() if not isinstance(value, dict)})

    def close(self, values: dict[str, Any]) -> None:
        """Closes the trackers, with a run's final values for those that show them."""
        if self.tracker is not None:
            self.tracker.finish(values)


def refuse_non_finite(step: int, metrics: StepMetrics) -> None:
    """Raises NonFiniteError naming what of the step was not finite."""
    if bool(metrics.all_finite):
        return
    flags = jax.tree_util.tree_leaves_with_path(metrics.gradients_finite)
    bad = [jax.tree_util.keystr(path, simple=True, separator="/") for path, finite in flags if not finite]
    what = ["loss"] if not metrics.loss_finite else []
    what += [f"gradient of {name}" for name in bad]
    more = f" and {len(what) - 3} more" if len(what) > 3 else ""
    raise NonFiniteError(f"step {step}: {', '.join(what[:3])}{more} not finite")


def peak_memory_bytes() -> int | None:
    """Most bytes in use on this process's first device since start; None where the backend does not say (CPU)."""
    stats = jax.local_devices()[0].memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")


def write_json(path: Path, value: Any) -> None:
    """Writes JSON whole or not at all."""
    scratch = path.with_suffix(".unfinished")
    scratch.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(scratch, path)
