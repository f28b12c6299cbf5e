"""Drops to expect on planned hardware, from recorded routing: the planned policy replayed at the planned ep degree.

Letters: P stages (valid, sender, receiver), U recorded steps. Runs the protocol's plan functions on CPU; all other
planning needs no device.
"""

from pathlib import Path
from typing import Any

import numpy as np

from ep_jax.config import RunConfig
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.traffic import Widths
from ep_jax.fields import ConfigError
from ep_jax.planning.sizes import ITEMSIZE
from ep_jax.replay.policies import TRANSPORTS, Family
from ep_jax.replay.replay import Request, replay
from ep_jax.replay.resharding import deal, groups, recorded_sizes
from ep_jax.replay.results import result_of
from ep_jax.traces.file import Trace


def expected_drops(config: RunConfig, path: str | Path) -> dict[str, Any]:
    """Drop rates of the planned policy on a trace of the same router, with a 95 % interval over its steps; JSON values.

    The trace's packed rows are dealt to mesh.ep shards, as many each as a GPU is planned to hold in a microbatch.
    Raises ConfigError when the trace is of another router or row length, has too few rows, or nothing can drop.
    """
    trace = Trace(path)
    header, first = trace.header, trace.read(trace.steps[0])
    recorded, router = recorded_sizes(first), config.router
    for name, found, planned in (
        ("router.num_experts", header.num_experts, router.num_experts),
        ("router.experts_per_token", recorded.choices, router.experts_per_token),
        ("data.sequence_length", header.sequence_length, config.data.sequence_length),
    ):
        if found != planned:
            raise ConfigError(f"--trace {path}: {name} = {planned}: was recorded with {found}; the two must be equal")
    if config.ep.transport not in TRANSPORTS:
        allowed = ", ".join(TRANSPORTS)
        raise ConfigError(f"--trace: ep.transport = {config.ep.transport}: drops nothing; allowed are {allowed}")
    family = Family(config.ep, config.mesh.ep)
    rows = config.train.sequences_per_step // (config.train.accumulation * config.mesh.size)
    shape = LayerShape(family.shards, header.num_experts, recorded.choices, rows * header.sequence_length)
    try:
        dealing = deal(header, recorded, family.shards, rows, len(trace))
        family.check(shape)
    except ConfigError as error:
        raise ConfigError(
            f"--trace {path}: at mesh.ep = {family.shards} with {rows} packed rows a GPU: {error}"
        ) from None
    request = Request.of_pairs(family, [(config.ep.sender_factor, config.ep.receiver_factor)])
    sizes = dict(num_experts=header.num_experts, sequence_length=header.sequence_length)
    [[outcome]] = replay(groups(dealing, trace), [request], **sizes)
    widths = Widths(config.model.latent_dim, 0, ITEMSIZE[config.model.compute_dtype])
    result = result_of(outcome, shape, rows, widths, seed=0)
    rate, layer_N, total_P = result.interval, result.layer_interval.rate, outcome.total_P
    return {
        "source": header.source,
        "steps": len(np.unique(outcome.steps_G)),
        "assumption": dealing.assumption,
        "order_known": header.order_known,
        "drop_rate": rate.rate,
        "interval": [rate.low, rate.high],
        "drop_rate_sender": float(total_P[1] / max(total_P[0], 1)),
        "drop_rate_receiver": float(total_P[2] / max(total_P[0], 1)),
        "lost_weight": float(outcome.lost_weight_2.sum()),
        "worst_layer": {"layer": int(layer_N.argmax()), "drop_rate": float(layer_N.max())},
    }
