"""Drops that a plan expects from a trace are those of the oracle at the planned ep and policy."""

import numpy as np
import pytest

from ep_jax.config import load
from ep_jax.ep import reference
from ep_jax.fields import ConfigError
from ep_jax.planning.expected import expected_drops
from ep_jax.planning.hardware import load_hardware
from ep_jax.planning.plan import make_plan, place
from ep_jax.traces import Trace, write_step
from ep_jax.traces.synthetic import generate
from tests.ep.ep_cases import policy_of
from tools.plan import lines

H200 = load_hardware("h200_8")


def planned(**changes):
    sizes = {"mesh.fsdp": "1", "mesh.ep": "8", "data.sequence_length": "16"}  # tiny has 16 sequences a step: 2 a GPU
    values = sizes | {"ep.order": "sequence", "ep.sender_factor": "1.1"} | changes
    return place(load("tiny", list(values.items())), H200)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """3 steps of 4 shards x 2 rows x 16 tokens: dealt to 8 shards of 2 rows, one and a half groups; one is left."""
    folder = tmp_path_factory.mktemp("traces") / "skew"
    sizes = dict(shards=4, rows_per_shard=2, sequence_length=16, num_experts=16, experts_per_token=2)
    for step in generate("document_skew", **sizes, num_layers=2, steps=3, sigma=1.0):
        write_step(folder, step)
    return folder


def test_equals_the_oracle(trace):
    config = planned()
    found = expected_drops(config, trace)
    read = list(Trace(trace))
    rows = np.concatenate([step.expert_ids_NMSTK[:, 0] for step in read], axis=1)[:, :8]  # [N, 8 shards, T, K]
    weights = np.concatenate([step.weights_NMSTK[:, 0] for step in read], axis=1)[:, :8]
    valid = np.concatenate([step.valid_MST[0] for step in read])[:8]
    fate = np.stack(
        [
            reference.fates(
                rows[layer].astype(int),
                weights[layer],
                valid,
                num_experts=16,
                sequence_length=16,
                policy=policy_of(config.ep),
            ).fate
            for layer in range(2)
        ]
    )
    counted = (fate != 3).sum()
    assert found["drop_rate_sender"] == pytest.approx((fate == 1).sum() / counted)
    assert found["drop_rate_receiver"] == pytest.approx((fate == 2).sum() / counted)
    dropped = (fate == 1) | (fate == 2)
    assert found["lost_weight"] == pytest.approx(weights[dropped].sum() / weights[fate != 3].sum())
    assert found["worst_layer"]["drop_rate"] == pytest.approx((dropped.sum(axis=(1, 2, 3)) / (counted / 2)).max())
    assert found["drop_rate"] > 0


def test_the_plan_prints_them(trace):
    config = planned()
    plan = make_plan(config, H200) | {"expected_drops": expected_drops(config, trace)}
    text = "\n".join(lines(plan))
    assert "Drops to expect at ep 8, from synthetic document_skew" in text
    assert "assumes 2 packed rows per shard" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "Drops to expect" not in "\n".join(lines(make_plan(config, H200)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router.num_experts": "32"}, "router.num_experts = 32: was recorded with 16"),
        ({"router.experts_per_token": "4"}, "router.experts_per_token = 4: was recorded with 2"),
        ({"ep.transport": "dense"}, "drops nothing"),
        ({"data.sequence_length": "32"}, "data.sequence_length = 32: was recorded with 16"),
        ({"train.sequences_per_step": "64"}, "with 8 packed rows a GPU: .* record at least 8 steps"),
    ],
)
def test_a_trace_of_another_router_is_refused(trace, changes, message):
    with pytest.raises(ConfigError, match=message):
        expected_drops(planned(**changes), trace)
