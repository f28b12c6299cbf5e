"""What each layer's drops cost: counterfactuals against both evaluations and against layers unrolled in Python.

Letters: N layers, B batches, P stages, E experts.
"""

import dataclasses
import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ep_jax import mesh as placement
from ep_jax.counterfactual import Attribution, attribute, draw, make_counterfactual_step, table
from ep_jax.data import Batch
from ep_jax.ep import routed_experts_local
from ep_jax.ep.settings import dropless
from ep_jax.evaluation import Evaluation, Pair
from ep_jax.mesh import AXES
from ep_jax.model.transformer import forward, parameter_kinds
from ep_jax.step import BATCH_SPEC, EvalSums, LayerDrops, make_eval_step
from tests.train.tiny_run import NO_DROP, QUICK_COMPILE, fresh_state, make_batch, mesh_of, tiny_config

TIGHT = dict(drops=True, ep__sender_factor=1.0, ep__receiver_factor=1.0)
CASES = {
    "pooled_wave": tiny_config(**TIGHT),
    "ragged": tiny_config(**TIGHT, ep__transport="ragged", ep__rescale=True, model__global_every=2),
    "fixed_cell": tiny_config(
        **TIGHT, ep__transport="fixed_cell", ep__waves=2, train__accumulation=2, train__sequences_per_step=16
    ),
}
PATTERNS = list(itertools.product([False, True], repeat=2))


def inputs_of(config):
    """(params, bias, batch) on the mesh; weights are so large that each drop tells in the loss."""
    state = fresh_state(config)
    batch = make_batch(M=config.train.accumulation)
    on_mesh = jax.device_put(batch, NamedSharding(mesh_of(config), BATCH_SPEC))
    return jax.tree.map(lambda leaf: 5 * leaf, state["params"]), state["router"]["bias"], on_mesh


@functools.cache
def evaluated(name):
    """(dropless, as trained, by pattern of layers that drop) EvalSums of a case."""
    config = CASES[name]
    mesh, inputs = mesh_of(config), inputs_of(config)
    free, policy = (
        jax.device_get(make_eval_step(config, mesh, ep).lower(*inputs).compile(QUICK_COMPILE)(*inputs))
        for ep in (dropless(config.ep), config.ep)
    )
    step = make_counterfactual_step(config, mesh, config.ep)
    compiled = step.lower(*inputs, np.array(PATTERNS[0])).compile(QUICK_COMPILE)  # one program for every pattern
    return free, policy, {pattern: jax.device_get(compiled(*inputs, np.array(pattern))) for pattern in PATTERNS}


@pytest.mark.parametrize("name", CASES)
def test_no_layer_is_the_dropless_evaluation_bitwise_and_all_layers_the_policy(name):
    free, policy, by_pattern = evaluated(name)
    assert by_pattern[False, False].cross_entropy == free.cross_entropy
    np.testing.assert_array_equal(by_pattern[False, False].drops.counts_NPE, free.drops.counts_NPE)
    np.testing.assert_allclose(by_pattern[True, True].cross_entropy, policy.cross_entropy, rtol=1e-6)
    np.testing.assert_array_equal(by_pattern[True, True].drops.counts_NPE, policy.drops.counts_NPE)
    assert policy.drops.counts_NPE[:, 1:].sum(axis=(1, 2)).min() > 10
    losses = sorted(float(sums.cross_entropy) for sums in by_pattern.values())
    assert np.diff(losses).min() > 1e-4 * losses[0]  # each pattern has a loss of its own


@pytest.mark.parametrize("name", CASES)
def test_drops_take_effect_in_the_named_layers_only(name):
    _, policy, by_pattern = evaluated(name)
    for pattern in PATTERNS:
        dropped_N = by_pattern[pattern].drops.counts_NPE[:, 1:].sum(axis=(1, 2))
        np.testing.assert_array_equal(dropped_N > 0, pattern)
    # The first layer has the same routes whatever the second does.
    np.testing.assert_array_equal(by_pattern[True, False].drops.counts_NPE[0], policy.drops.counts_NPE[0])


def unrolled_loss(config, by_layer):
    """Summed cross entropy of one block of all layers, unrolled in Python, each under settings of its own."""
    params, bias, batch = inputs_of(config)
    layers, blocks = config.model.num_layers, params["blocks"]
    if config.model.global_every == 1:
        parts = [jax.tree.map(operator.itemgetter(slice(i, i + 1)), blocks["layer_0"]) for i in range(layers)]
        blocks = {f"layer_{i}": part for i, part in enumerate(parts)}
    params = {**params, "blocks": blocks}
    model = dataclasses.replace(config.model, global_every=layers)
    kinds = parameter_kinds(model, config.router)
    specs = placement.param_specs(kinds, params)
    calls = itertools.count()

    def routed_experts(*arrays, **sizes):
        out, _ = routed_experts_local(*arrays, **sizes, settings=by_layer[next(calls) % layers])
        return out, jnp.zeros(())

    def local(params, bias, batch):
        loss = 0.0
        for rows in (Batch(*(array[i] for array in batch)) for i in range(config.train.accumulation)):
            loss += forward(
                params, bias, rows, model=model, router=config.router, valid_total=jnp.float32(1),
                routed_experts=routed_experts,
            ).cross_entropy  # fmt: skip
        return lax.psum(loss, AXES)

    whole = PartitionSpec()
    evaluate = jax.shard_map(
        local, mesh=mesh_of(config), in_specs=(specs, whole, Batch(*(BATCH_SPEC,) * 5)), out_specs=whole
    )
    loss = jax.jit(evaluate).lower(params, bias, batch).compile(QUICK_COMPILE)(params, bias, batch)
    assert next(calls) % layers == 0
    return float(loss)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pattern", [(True, False), (False, True)])
def test_one_layer_equals_the_model_in_which_the_other_has_room_for_everything(name, pattern):
    config, (free, _, by_pattern) = CASES[name], evaluated(name)
    roomy = dataclasses.replace(config.ep, sender_factor=NO_DROP, receiver_factor=NO_DROP)
    wanted = unrolled_loss(config, [config.ep if drops else roomy for drops in pattern])
    np.testing.assert_allclose(by_pattern[pattern].cross_entropy, wanted, rtol=1e-5)
    assert abs(wanted - free.cross_entropy) > 1e-4 * wanted


def evaluation_of(nats_B, targets_B, layers=3):
    counts_NPE = np.zeros((layers, 3, 2), np.int64)
    counts_NPE[:, 0] = 50
    return Evaluation(np.array(nats_B, np.float64), np.array(targets_B), counts_NPE)


@pytest.fixture
def attribution():
    """Of a made-up step: layer n alone costs COST[n] nats in every batch, and all three together one more."""
    base_B, targets_B, cost_N = [100.0, 140.0, 90.0, 120.0], [50, 60, 50, 40], np.array([3.0, 2.0, 0.0])
    whole_B = np.add(base_B, 6.0) + np.array([0.5, -0.5, 0.25, -0.25])

    def step(params, bias, batch, drops_N):
        assert (params, bias) == ("params", "bias")
        counts_NPE = np.zeros((3, 3, 2), np.int32)
        counts_NPE[:, 0] = 50
        counts_NPE[drops_N, 1] = 1 + batch
        drops = LayerDrops(counts_NPE, None, None, None)
        return EvalSums(np.float32(base_B[batch] + cost_N[drops_N].sum()), np.int32(targets_B[batch]), drops)

    pair = Pair(evaluation_of(base_B, targets_B), evaluation_of(whole_B, targets_B))
    return attribute(step, "params", "bias", range(4), pair)


def test_costs_are_paired_differences_per_target(attribution: Attribution):
    targets = 200
    assert attribution.pair.cost.nats == pytest.approx(24 / targets)
    for layer, cost in enumerate((3.0, 2.0, 0.0)):
        assert attribution.lost_alone(layer).nats == pytest.approx(4 * cost / targets)
        assert attribution.saved_alone(layer).nats == pytest.approx(4 * (cost + 1) / targets)
        assert attribution.share(layer) == pytest.approx(cost / 6)
    assert attribution.sum_alone.nats == pytest.approx(20 / targets)
    assert attribution.interaction.nats == pytest.approx(4 / targets)
    np.testing.assert_array_equal(attribution.counts_NPE[:, 1], np.full((3, 2), 1 + 2 + 3 + 4))
    np.testing.assert_array_equal(attribution.counts_NPE[:, 0], np.full((3, 2), 4 * 50))


def test_table_and_json_say_the_same(attribution: Attribution):
    lines, values = table(attribution, "document").splitlines(), attribution.as_json()
    assert "rows in document order" in lines[0]
    assert "4 batches" in lines[0]
    for layer in values["layers"]:
        columns = lines[2 + layer["layer"]].split()
        assert columns[:3] == [str(layer["layer"]), "5.000", f"{layer['lost_alone']['nats']:.5f}"]
        assert columns[5] == f"{100 * layer['share']:.1f}"
        assert columns[6] == f"{layer['saved_alone']['nats']:.5f}"
    for name in ("sum_alone", "cost", "interaction"):
        assert f"{values[name]['nats']:.5f} ± {values[name]['standard_error_nats']:.5f}" in lines[-1]


def test_the_figure_has_a_bar_an_order_and_layer(attribution: Attribution):
    [axis] = draw({"shuffled": attribution, "document": attribution}).axes
    assert len(axis.patches) == 6
    np.testing.assert_allclose([bar.get_height() for bar in axis.patches], 2 * [12 / 200, 8 / 200, 0], atol=1e-12)


def test_no_share_is_claimed_of_a_cost_that_may_be_noise(attribution: Attribution):
    noisy = evaluation_of(attribution.pair.free.nats_B + np.array([9, -7, 9, -7]), attribution.pair.free.targets_B)
    doubtful = dataclasses.replace(attribution, pair=Pair(attribution.pair.free, noisy))
    assert doubtful.pair.cost.nats > 0
    assert doubtful.share(0) is None
    assert table(doubtful, "shuffled").splitlines()[2].split()[5] == "-"
