"""Held-out loss of given parameters under given protocol settings. Used by `train.py` and `evaluate.py`.

The router's bias is applied and not updated. Not here: what a single layer's drops cost (`counterfactual.py`).

Letters: B batches, N layers, P stages (valid, sender, receiver), E experts.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from ep_jax.config import RunConfig
from ep_jax.data import Batch, Sequences
from ep_jax.data.batches import Layout, held_out_batches, held_out_rows
from ep_jax.ep import EPConfig
from ep_jax.ep.drops import STAGES
from ep_jax.ep.settings import dropless
from ep_jax.metrics import add_drops, drop_rates
from ep_jax.step import make_eval_step
from ep_jax.traces.config import TraceConfig
from ep_jax.traces.recorder import Recorder

# 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom; the last serves for more. With few batches a standard
# error is itself uncertain, and two of them are no 95 % interval.
STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
ORDER_NAMES = {"shuffled": "shuffled rows", "document": "rows in document order"}


class Estimate(NamedTuple):
    """A mean over targets, and how far another sample of batches may lie from it."""

    nats: float  # per valid target
    standard_error_nats: float | None  # one standard error over batches; None when there is one batch only
    batches: int

    @property
    def is_noise(self) -> bool:
        """Whether zero lies within the 95 % interval, or nobody knows."""
        if self.standard_error_nats is None:
            return True
        quantile = STUDENT_T[min(self.batches - 1, len(STUDENT_T)) - 1]
        return abs(self.nats) <= quantile * self.standard_error_nats

    def as_json(self) -> dict[str, float | None]:
        return {"nats": self.nats, "standard_error_nats": self.standard_error_nats}

    def __str__(self) -> str:
        return f"{self.nats:.5f} ± " + ("?" if self.standard_error_nats is None else f"{self.standard_error_nats:.5f}")


def per_target(nats_B: np.ndarray, targets_B: np.ndarray) -> Estimate:
    """The sum over all batches per target, with the standard error of such a ratio over independent batches."""
    batches, targets = len(nats_B), max(float(np.sum(targets_B)), 1.0)
    mean = float(np.sum(nats_B)) / targets
    if batches < 2:
        return Estimate(mean, None, batches)
    deviations_B = nats_B - mean * targets_B
    error = math.sqrt(batches / (batches - 1) * float(np.sum(deviations_B**2))) / targets
    return Estimate(mean, error, batches)


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """Held-out loss over a fixed sample of packed rows."""

    nats_B: np.ndarray  # float64, cross entropy summed over the batch's valid targets
    targets_B: np.ndarray  # int64, valid targets
    counts_NPE: np.ndarray  # int64, drops by layer, stage and expert

    @property
    def cross_entropy(self) -> float:
        """Nats per valid target."""
        return per_target(self.nats_B, self.targets_B).nats

    @property
    def valid_targets(self) -> int:
        return int(self.targets_B.sum())

    @property
    def drop_rates(self) -> dict[str, float]:
        return drop_rates(self.counts_NPE)

    def as_json(self) -> dict[str, Any]:
        return {"cross_entropy": self.cross_entropy, "valid_targets": self.valid_targets, **self.drop_rates}


class Pair(NamedTuple):
    """The same rows and parameters evaluated twice."""

    free: Evaluation  # dropless
    policy: Evaluation  # under the training capacity

    @property
    def cost(self) -> Estimate:
        """What drops cost: the second loss minus the first, batch by batch, so that hard batches do not blur it."""
        return per_target(self.policy.nats_B - self.free.nats_B, self.free.targets_B)


class Evaluator:
    """Evaluates parameters on the same held-out rows each time; compiles once per protocol setting."""

    def __init__(self, config: RunConfig, mesh: Mesh, held_out: Sequences):
        self.config, self.mesh, self.held_out = config, mesh, held_out
        self.layout = Layout(
            held_out,
            sequences_per_step=config.train.sequences_per_step,
            accumulation=config.train.accumulation,
            mesh=mesh,
        )
        self.steps: dict[tuple[EPConfig, bool], Any] = {}

    def __call__(
        self, params: Any, router_bias: Any, ep: EPConfig, order: str = "shuffled", recorder: Recorder | None = None
    ) -> Evaluation:
        """Loss under `ep`; the same for every mesh up to float32 rounding when nothing drops.

        order: of HELD_OUT_ORDERS. A recorder gets the routing of every trace.every-th batch.
        """
        step, config = self._step(ep, recorder is not None), self.config
        nats, targets = [], []
        counts = np.zeros((config.model.num_layers, len(STAGES), config.router.num_experts), np.int64)
        for index, batch in enumerate(self.batches(order)):
            sums = step(params, router_bias, batch)
            if recorder is not None and config.trace.due(index + 1):
                size = config.train.sequences_per_step
                rows = held_out_rows(self.held_out, index, size, config.train.eval_sequences, order)
                recorder.record(index + 1, sums.routes, sums.drops.counts_NPE, rows)
            nats.append(float(sums.cross_entropy))
            targets.append(int(sums.valid_targets))
            counts = add_drops(counts, sums.drops.counts_NPE)
        return Evaluation(np.array(nats, np.float64), np.array(targets, np.int64), counts)

    def paired(self, params: Any, router_bias: Any, order: str = "shuffled", recorder: Recorder | None = None) -> Pair:
        """Dropless and under the training capacity on the same rows. A recorder gets the routing of the second."""
        ep = self.config.ep
        if ep == dropless(ep):
            free = self(params, router_bias, ep, order, recorder)
            return Pair(free, free)
        return Pair(self(params, router_bias, dropless(ep), order), self(params, router_bias, ep, order, recorder))

    def batches(self, order: str) -> Iterator[Batch]:
        """The held-out batches of an order."""
        return held_out_batches(
            self.held_out,
            sequences_per_batch=self.config.train.sequences_per_step,
            accumulation=self.config.train.accumulation,
            mesh=self.mesh,
            num_sequences=self.config.train.eval_sequences,
            order=order,
        )

    def _step(self, ep: EPConfig, traced: bool) -> Any:
        if (ep, traced) not in self.steps:
            config = self.config if traced else dataclasses.replace(self.config, trace=TraceConfig())
            self.steps[ep, traced] = make_eval_step(config, self.mesh, ep)
        return self.steps[ep, traced]


def comparison(free: Evaluation, policy: Evaluation, bigram: float | None, ep: EPConfig) -> str:
    """Both losses side by side with the drop rate, and the bigram table's loss as a yardstick."""
    rates = policy.drop_rates
    lines = [
        f"held-out cross entropy, nats per token over {free.valid_targets:,} targets",
        f"  {'dropless':<28}{free.cross_entropy:8.4f}",
        f"  {ep.transport + ' as trained':<28}{policy.cross_entropy:8.4f}   {100 * rates['drop_rate']:.2f} % dropped "
        f"({100 * rates['drop_rate_sender']:.2f} sender, {100 * rates['drop_rate_receiver']:.2f} receiver)",
    ]
    if bigram is not None:
        lines.append(f"  {'bigram table':<28}{bigram:8.4f}   fitted on the same training text")
    return "\n".join(lines)


def paired_table(pairs: Mapping[str, Pair], bigram: float) -> str:
    """Each order's losses side by side, what drops cost and whether that is more than noise, and drops by stage."""
    lines = [
        "held-out cross entropy, nats per token",
        f"  {'':<24}{'dropless':>9}{'as trained':>12}{'cost of drops':>20}"
        f"{'dropped %':>11}{'sender %':>10}{'receiver %':>12}{'targets':>13}",
    ]
    notes, batches = [], len(next(iter(pairs.values())).free.nats_B)
    for order, pair in pairs.items():
        rates = [100 * pair.policy.drop_rates[f"drop_rate{stage}"] for stage in ("", "_sender", "_receiver")]
        lines.append(
            f"  {ORDER_NAMES[order]:<24}{pair.free.cross_entropy:>9.4f}{pair.policy.cross_entropy:>12.4f}"
            f"{pair.cost!s:>20}{rates[0]:>11.2f}{rates[1]:>10.2f}{rates[2]:>12.2f}{pair.free.valid_targets:>13,}"
        )
        if rates[0] and pair.cost.is_noise:
            notes.append(
                f"the cost on {ORDER_NAMES[order]} may be noise: its 95 % interval holds zero; more "
                f"train.eval_sequences tell"
            )
    lines.append(f"  {'bigram table':<24}{bigram:>9.4f}   fitted on the same training text")
    lines.append(
        f"cost of drops: as trained minus dropless, batch by batch; ± one standard error over {batches} batches"
    )
    return "\n".join(lines + notes)
