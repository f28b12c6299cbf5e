"""A replay of recorded routes drops what the devices dropped, to the unit; a count that is off by one is found.

The trace is made here from routes that `routed_experts` ran on 8 devices; the one of a training run is tested with it.
Run: python -m pytest tests/replay/test_check.py
"""

import dataclasses

import jax
import numpy as np
import pytest

from ep_jax.ep import EPConfig, routed_experts
from ep_jax.fields import ConfigError
from ep_jax.replay.check import difference, policy_of, replayed_counts
from ep_jax.traces.file import TraceHeader, TraceStep
from tests.ep import ep_cases
from tests.ep.ep_cases import NUM_DEVICES, Sizes, mesh_of, problem

SIZES = Sizes(width=2, hidden=2)
LAYERS, MICROBATCHES = 2, 2
SETTINGS = (
    EPConfig(sender_factor=0.9, receiver_factor=1.05, order="weight", waves=2),
    EPConfig(sender_factor=1.1, receiver_factor=0.8, receive="pool", premix=2),
    EPConfig(transport="fixed_cell", sender_factor=1.3),
    EPConfig(transport="ragged", agreed="water_fill", receiver_factor=0.9, waves=3),
    EPConfig(sender_factor=1.2, receiver_factor=1.1, emulated_shards=8),
)


def run(settings, mesh) -> TraceStep:
    """Layers and microbatches on the devices of a mesh, recorded with what was counted."""
    layer = jax.jit(
        lambda *arrays: (
            routed_experts(*arrays, sequence_length=SIZES.sequence_length, mesh=mesh, settings=settings)[1].counts_PE
        ),
        compiler_options=ep_cases.QUICK,
    )
    seeds = np.arange(LAYERS * MICROBATCHES).reshape(LAYERS, MICROBATCHES)
    given = [[problem(ep_cases.by_document, SIZES, int(seed)) for seed in row] for row in seeds]
    valid_MST = np.stack([microbatch.valid for microbatch in given[0]])
    counts_NPE = np.zeros((LAYERS, 3, SIZES.experts), np.int64)
    for counts_PE, row in zip(counts_NPE, given, strict=True):
        for one, valid in zip(row, valid_MST, strict=True):
            arrays = (one.rows, one.ids, one.extra_weights, valid, one.w_gate_up, one.w_down)
            counts_PE += np.asarray(layer(*arrays))

    def dealt(array):
        return array.reshape(*array.shape[:-2], NUM_DEVICES, -1, SIZES.choices)

    document_MST = np.where(valid_MST, 1, -1).reshape(MICROBATCHES, NUM_DEVICES, -1)
    header = TraceHeader(
        num_experts=SIZES.experts,
        sequence_length=SIZES.sequence_length,
        ep=mesh.shape["ep"],
        source="test",
        policy=dataclasses.asdict(settings),
    )
    return TraceStep(
        header=header,
        step=1,
        expert_ids_NMSTK=dealt(np.array([[one.ids for one in row] for row in given])).astype(np.uint8),
        weights_NMSTK=dealt(np.array([[one.extra_weights for one in row] for row in given])),
        valid_MST=document_MST > 0,
        document_MST=document_MST,
        position_MST=document_MST,
        counts_NPE=counts_NPE,
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.transport}-{s.emulated_shards}-{s.premix}")
def test_replay_drops_what_the_devices_dropped(settings):
    step = run(settings, mesh_of(1, 2, 4))
    assert step.counts_NPE[:, 1:].sum() > 20
    assert difference(step, step.counts_NPE, policy_of(step.header.policy)) == ""
    np.testing.assert_array_equal(replayed_counts(step, settings), step.counts_NPE)
    wrong_NPE = step.counts_NPE.copy()
    wrong_NPE[1, 2, 5] += 1
    found = difference(step, wrong_NPE, settings)
    assert found.startswith("step 1, layer 1, expert 5, receiver: the run counted ")
    assert "(1 such counts)" in found


def test_refuses_a_policy_it_does_not_know():
    assert policy_of(dataclasses.asdict(SETTINGS[0])) == SETTINGS[0]
    with pytest.raises(ConfigError, match="the trace's policy has colour: allowed are"):
        policy_of({"colour": "red"})
