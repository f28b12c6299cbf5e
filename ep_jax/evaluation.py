"""Held-out loss of given parameters under given protocol settings. Used by `train.py` and `evaluate.py`.

The router's bias is applied and not updated. Not here: which settings to compare, and how results are shown.
"""

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ep_jax.config import RunConfig
from ep_jax.data import Sequences
from ep_jax.data.batches import Layout, held_out_batches, held_out_rows
from ep_jax.ep import EPConfig
from ep_jax.ep.drops import STAGES
from ep_jax.metrics import add_drops, drop_rates
from ep_jax.step import dropless, make_eval_step
from ep_jax.traces.config import TraceConfig
from ep_jax.traces.recorder import Recorder


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Held-out loss over a fixed sample of packed rows."""

    cross_entropy: float  # nats per valid target
    valid_targets: int
    counts_NPE: np.ndarray  # int64, drops by layer, stage and expert

    @property
    def drop_rates(self) -> dict[str, float]:
        return drop_rates(self.counts_NPE)

    def as_json(self) -> dict[str, Any]:
        return {"cross_entropy": self.cross_entropy, "valid_targets": self.valid_targets, **self.drop_rates}


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

    def __call__(self, params: Any, router_bias: Any, ep: EPConfig, recorder: Recorder | None = None) -> Evaluation:
        """Loss under `ep`; the same for every mesh up to float32 rounding when nothing drops.

        A recorder gets the routing of every trace.every-th batch.
        """
        step = self._step(ep, recorder is not None)
        config, loss_sum, valid = self.config, 0.0, 0
        counts = np.zeros((config.model.num_layers, len(STAGES), config.router.num_experts), np.int64)
        batches = held_out_batches(
            self.held_out,
            sequences_per_batch=config.train.sequences_per_step,
            accumulation=config.train.accumulation,
            mesh=self.mesh,
            num_sequences=config.train.eval_sequences,
        )
        for index, batch in enumerate(batches):
            sums = step(params, router_bias, batch)
            if recorder is not None and config.trace.due(index + 1):
                size = config.train.sequences_per_step
                rows = held_out_rows(self.held_out, index, size, config.train.eval_sequences)
                recorder.record(index + 1, sums.routes, sums.drops.counts_NPE, rows)
            loss_sum += float(sums.cross_entropy)
            valid += int(sums.valid_targets)
            counts = add_drops(counts, sums.drops.counts_NPE)
        return Evaluation(loss_sum / max(valid, 1), valid, counts)

    def paired(self, params: Any, router_bias: Any, recorder: Recorder | None = None) -> tuple[Evaluation, Evaluation]:
        """(dropless, under the training capacity) on the same rows. A recorder gets the routing of the second."""
        ep = self.config.ep
        if ep == dropless(ep):
            free = self(params, router_bias, ep, recorder)
            return free, free
        return self(params, router_bias, dropless(ep)), self(params, router_bias, ep, recorder)

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
