"""Small traces for the tests of ep_jax.replay: documents with their own taste, padding, two microbatches.

Letters: N layers, M microbatches, S source shards, T tokens of a shard, K choices.
"""

import dataclasses

import numpy as np

from ep_jax.ep import reference
from ep_jax.replay.resharding import Group
from ep_jax.traces.file import TraceHeader, TraceStep
from tests.ep.ep_cases import policy_of

LAYERS, MICROBATCHES, SHARDS, ROWS, LENGTH, CHOICES, EXPERTS = 2, 2, 8, 2, 8, 3, 16


def make_step(number: int = 1, *, ep: int = 4, microbatches: int = MICROBATCHES, skew: float = 1.5) -> TraceStep:
    """A step whose documents are half a packed row long; a tenth of the tokens is padding; ids differ everywhere."""
    rng = np.random.default_rng(number)
    size = (LAYERS, microbatches, SHARDS, ROWS * LENGTH)
    taste = np.repeat(rng.gumbel(size=(*size[:3], 2 * ROWS, EXPERTS)) * skew, LENGTH // 2, axis=3)
    ids = np.argsort(-(taste + rng.gumbel(size=taste.shape)), axis=-1)[..., :CHOICES]
    valid = rng.random(size[1:]) < 0.9
    document = np.arange(valid.size).reshape(valid.shape) // (LENGTH // 2) + 1000 * number
    position = np.broadcast_to(np.arange(ROWS * LENGTH) % (LENGTH // 2), valid.shape)
    return TraceStep(
        header=TraceHeader(num_experts=EXPERTS, sequence_length=LENGTH, ep=ep, source="a test"),
        step=number,
        expert_ids_NMSTK=ids.astype(np.uint8),
        weights_NMSTK=rng.random(ids.shape).astype(np.float32),
        valid_MST=valid,
        document_MST=np.where(valid, document, -1),
        position_MST=np.where(valid, position, -1),
    )


def make_group(number: int = 1, shards: int = SHARDS) -> Group:
    """The first `shards` shards of a step's first microbatch."""
    step = make_step(number)
    return Group(
        0,
        step.expert_ids_NMSTK[:, 0, :shards],
        step.weights_NMSTK[:, 0, :shards],
        step.valid_MST[0, :shards],
        step.document_MST[0, :shards],
    )


def oracle(group: Group, layer: int, settings) -> np.ndarray:
    """Fates [S,T,K] by the NumPy reference."""
    arrays = (group.expert_ids_NSTK[layer].astype(np.int32), group.weights_NSTK[layer], group.valid_ST)
    settings = dataclasses.replace(settings, emulated_shards=0)
    return reference.fates(*arrays, num_experts=EXPERTS, sequence_length=LENGTH, policy=policy_of(settings)).fate
