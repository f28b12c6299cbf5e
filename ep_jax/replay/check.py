"""Whether a replay drops what the run itself counted: the policy of the trace, at the recorded degree, to the unit.

Letters: N layers, P stages (valid, sender, receiver), E experts.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ep_jax.ep.drops import DROPPED_BY_RECEIVER, DROPPED_BY_SENDER, INVALID, STAGES
from ep_jax.ep.settings import EPConfig
from ep_jax.ep.simulate import simulate
from ep_jax.fields import ConfigError
from ep_jax.replay.resharding import deal, groups, recorded_sizes
from ep_jax.traces.file import TraceStep


def policy_of(policy: Mapping[str, Any]) -> EPConfig:
    """The policy in a trace's header. Raises ConfigError when it has settings that this version does not know."""
    known = {field.name for field in dataclasses.fields(EPConfig)}
    if unknown := sorted(set(policy) - known):
        raise ConfigError(f"the trace's policy has {', '.join(unknown)}: allowed are {', '.join(sorted(known))}")
    return EPConfig(**policy)


def replayed_counts(step: TraceStep, settings: EPConfig) -> np.ndarray:
    """int64 [N,P,E]: what `simulate` drops of one step under the run's own settings, all ep groups and microbatches."""
    header = step.header
    shards = settings.emulated_shards if settings.emulates else header.ep
    dealing = deal(header, recorded_sizes(step), shards, "split", 1)
    sizes = dict(num_experts=header.num_experts, sequence_length=header.sequence_length, settings=settings)
    counts_NPE = np.zeros((dealing.recorded.layers, len(STAGES), header.num_experts), np.int64)
    for group in groups(dealing, [step]):
        for layer, ids_STK in enumerate(group.expert_ids_NSTK):
            fate_STK = np.asarray(
                simulate(ids_STK.astype(np.int32), group.weights_NSTK[layer], group.valid_ST, **sizes)
            )
            masks = (fate_STK != INVALID, fate_STK == DROPPED_BY_SENDER, fate_STK == DROPPED_BY_RECEIVER)
            counts_NPE[layer] += [np.bincount(ids_STK[mask], minlength=header.num_experts) for mask in masks]
    return counts_NPE


def difference(step: TraceStep, counted_NPE: np.ndarray, settings: EPConfig) -> str:
    """The first count in which a step's replay and the run differ, in words; empty when they agree to the unit."""
    replayed_NPE = replayed_counts(step, settings)
    if replayed_NPE.shape != counted_NPE.shape:
        return f"step {step.step}: the run counted {counted_NPE.shape}, the replay {replayed_NPE.shape}"
    wrong = np.argwhere(replayed_NPE != counted_NPE)
    if not len(wrong):
        return ""
    layer, stage, expert = wrong[0].tolist()
    return (
        f"step {step.step}, layer {layer}, expert {expert}, {STAGES[stage]}: the run counted "
        f"{counted_NPE[layer, stage, expert]}, the replay {replayed_NPE[layer, stage, expert]} "
        f"({len(wrong)} such counts)"
    )
