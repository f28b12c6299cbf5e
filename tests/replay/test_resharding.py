"""Who meets whom: packed rows dealt to other numbers of shards, whole, in order, none twice.

Run: python -m pytest tests/replay/test_resharding.py
"""

import dataclasses

import numpy as np
import pytest

from ep_jax.fields import ConfigError
from ep_jax.replay.resharding import deal, groups, recorded_sizes
from tests.replay.replay_cases import LENGTH, MICROBATCHES, ROWS, SHARDS, make_step

STEP_ROWS = MICROBATCHES * SHARDS * ROWS  # 32


def dealt(shards, rows, steps):
    dealing = deal(steps[0].header, recorded_sizes(steps[0]), shards, rows, len(steps))
    return dealing, list(groups(dealing, iter(steps)))


def stream_of(steps):
    """Every packed row as (ids [N,L,K], weights, valid [L], document), in recorded order, by loops."""
    rows = []
    for step in steps:
        for microbatch in range(MICROBATCHES):
            for shard in range(SHARDS):
                for row in range(ROWS):
                    columns = slice(row * LENGTH, (row + 1) * LENGTH)
                    at = (microbatch, shard, columns)
                    arrays = (step.expert_ids_NMSTK[:, *at], step.weights_NMSTK[:, *at])
                    rows.append((*arrays, step.valid_MST[at], step.document_MST[at]))
    return rows


@pytest.mark.parametrize(
    ("shards", "rows", "rows_per_shard"),
    [
        (4, "recorded", 2),
        (8, "recorded", 2),
        (2, "recorded", 2),
        (16, "recorded", 2),
        (8, "split", 1),
        (2, "split", 4),
        (16, 5, 5),
        (1, 3, 3),
    ],
)
def test_groups_are_the_next_rows_of_the_stream(shards, rows, rows_per_shard):
    steps = [make_step(number) for number in (1, 2, 3)]
    dealing, found = dealt(shards, rows, steps)
    assert dealing.rows == rows_per_shard
    stream = stream_of(steps)
    assert len(found) == len(stream) // (shards * rows_per_shard)
    rest = iter(stream)
    for number, group in enumerate(found):
        assert group.step == number * shards * rows_per_shard // STEP_ROWS
        assert group.valid_ST.shape == (shards, rows_per_shard * LENGTH)
        for shard in range(shards):
            for row in range(rows_per_shard):
                columns = slice(row * LENGTH, (row + 1) * LENGTH)
                ids, weights, valid, document = next(rest)
                np.testing.assert_array_equal(group.expert_ids_NSTK[:, shard, columns], ids)
                np.testing.assert_array_equal(group.weights_NSTK[:, shard, columns], weights)
                np.testing.assert_array_equal(group.valid_ST[shard, columns], valid)
                np.testing.assert_array_equal(group.document_ST[shard, columns], document)


def test_as_recorded_assumes_nothing():
    step = make_step()
    dealing, found = dealt(4, "recorded", [step])
    assert dealing.as_recorded
    assert dealing.assumption == ""
    assert len(found) == MICROBATCHES * SHARDS // 4
    np.testing.assert_array_equal(found[1].expert_ids_NSTK, step.expert_ids_NMSTK[:, 0, 4:])
    assert np.shares_memory(found[1].expert_ids_NSTK, step.expert_ids_NMSTK)  # nothing is copied within a step


def test_the_assumption_is_said():
    def said(shards, rows="recorded"):
        return dealt(shards, rows, [make_step(number) for number in (1, 2)])[0].assumption

    assert "2 packed rows per shard (as recorded)" in said(8)
    assert "several recorded ep groups or microbatches would have met in one" in said(8)
    assert "assumes 1 packed row per shard (not 2 as recorded)" in said(8, "split")
    assert "smaller shards or groups" in said(8, "split")
    assert "rows of 2 recorded steps would have met in one" in said(16, 4)
    assert "run of 8 shards in groups of 4" in said(16, 4)
    assert "\n" not in said(16, 4)


@pytest.mark.parametrize(
    ("shards", "rows", "message"),
    [
        (
            3,
            "recorded",
            "--shards 3: the trace has 16 experts, and every shard holds as many; allowed are 1, 2, 4, 8, 16",
        ),
        (32, "recorded", "--shards 32: the trace has 16 experts"),
        (16, "split", "--rows split: the 8 packed rows of a recorded ep group cannot be dealt to 16 shards"),
        (16, 9, "16 shards of 9 packed rows need 144 rows, the trace has 2 x 32: record at least 5 steps"),
        (4, 0, "--rows 0: allowed are recorded, split or packed rows per shard"),
    ],
)
def test_refuses_what_cannot_be_dealt(shards, rows, message):
    with pytest.raises(ConfigError) as error:
        dealt(shards, rows, [make_step(1), make_step(2)])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_steps_of_another_batch_or_mesh_follow_as_rows():
    """A run may go on with another batch: its packed rows are dealt like the others."""
    first, small = make_step(1), make_step(2, microbatches=1)
    _, found = dealt(4, "recorded", [first, small])
    rows = np.concatenate([step.document_MST.reshape(-1, LENGTH) for step in (first, small)])
    np.testing.assert_array_equal(np.concatenate([group.document_ST.reshape(-1, LENGTH) for group in found]), rows)


def test_refuses_steps_of_another_model():
    step = make_step(2)
    other = dataclasses.replace(step, expert_ids_NMSTK=step.expert_ids_NMSTK[:1], weights_NMSTK=step.weights_NMSTK[:1])
    with pytest.raises(ConfigError, match="step 2: 1 layers, .* as in the first"):
        dealt(4, "recorded", [make_step(1), other])


def test_holds_no_more_steps_than_a_group_needs():
    alive = []

    def steps():
        for number in range(1, 7):
            alive.append(number)
            yield make_step(number)

    dealing = deal(make_step().header, recorded_sizes(make_step()), 16, 4, 6)  # two steps a group
    for place, _ in enumerate(groups(dealing, steps())):
        assert len(alive) == 2 * (place + 1)


def test_sizes_of_a_step():
    assert dataclasses.astuple(recorded_sizes(make_step())) == (2, MICROBATCHES, SHARDS, ROWS, 3)
    assert recorded_sizes(make_step()).step_rows == STEP_ROWS
