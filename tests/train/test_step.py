"""The training and the evaluation step on hand-made batches: same numbers on every mesh, transport and accumulation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from ep_jax.checkpoint import CheckpointConfig, Checkpointer, Point
from ep_jax.ep.settings import dropless
from ep_jax.report import NonFiniteError, refuse_non_finite
from ep_jax.state import init_state, restore_state, state_target
from ep_jax.step import BATCH_SPEC, make_eval_step, make_train_step
from tests.programs import float_scatter_adds
from tests.train.tiny_run import (
    assert_close,
    assert_same_bits,
    compiled_step,
    fresh_state,
    gradients_after_one_step,
    make_batch,
    mesh_of,
    placed,
    take_steps,
    tiny_config,
    without,
)

BATCHES = [make_batch(seed) for seed in range(3)]
ONE_DEVICE = (1, 1, 1)
MESHES = [(1, 8, 1), (1, 2, 4), (1, 1, 8), (2, 2, 2)]


@pytest.fixture(scope="module")
def one_device():
    """(state, metrics) after three steps on one device."""
    config = tiny_config(ONE_DEVICE)
    return take_steps(config, fresh_state(config), BATCHES)


@pytest.mark.parametrize("mesh_shape", [ONE_DEVICE, (2, 2, 2)])
def test_the_first_state_is_the_same_on_every_mesh(mesh_shape):
    config = tiny_config(mesh_shape)
    state = init_state(config, mesh_of(config))
    assert_same_bits(state, fresh_state(config))
    assert state["step"] == 0


@pytest.mark.parametrize("mesh_shape", MESHES)
def test_losses_norms_and_bias_are_the_same_on_every_mesh(mesh_shape, one_device):
    config = tiny_config(mesh_shape)
    state, metrics = take_steps(config, fresh_state(config), BATCHES)
    wanted_state, wanted = one_device
    for name in ("loss", "cross_entropy", "load_balance", "z_loss", "grad_norm"):
        np.testing.assert_allclose([getattr(m, name) for m in metrics], [getattr(m, name) for m in wanted], rtol=1e-5)
    np.testing.assert_array_equal(state["router"]["bias"], wanted_state["router"]["bias"])
    for got, expected, batch in zip(metrics, wanted, BATCHES, strict=True):
        assert got.valid_targets == expected.valid_targets == batch.valid.sum()
        np.testing.assert_array_equal(got.drops.counts_NPE, expected.drops.counts_NPE)
        np.testing.assert_array_equal(got.drops.counts_NPE.sum((1, 2)), 2 * batch.valid.sum())
        assert got.drops.source_counts_NDP.shape == (2, config.mesh.size, 3)
        np.testing.assert_array_equal(got.drops.source_counts_NDP.sum(1), got.drops.counts_NPE.sum(2))


@pytest.mark.parametrize("mesh_shape", MESHES)
def test_gradient_norm_counts_each_parameter_once_and_copies_stay_equal(mesh_shape, one_device):
    config = tiny_config(mesh_shape)
    state, [metrics] = take_steps(config, fresh_state(config), BATCHES[:1])
    gradients = gradients_after_one_step(config, state)
    assert metrics.grad_norm < config.optimizer.clip_norm  # so these are the gradients themselves
    np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(gradients), rtol=1e-5)
    one = tiny_config(ONE_DEVICE)
    assert_close(gradients, gradients_after_one_step(one, take_steps(one, fresh_state(one), BATCHES[:1])[0]), 2e-5)

    state, _ = take_steps(config, state, BATCHES[1:])
    for path, leaf in jax.tree.leaves_with_path(state):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert {len(bits) for bits in copies.values()} == {1}, jax.tree_util.keystr(path)


def test_clipping_uses_the_one_global_norm():
    config = tiny_config()
    _, [metrics] = take_steps(config, fresh_state(config), BATCHES[:1])
    half = tiny_config(optimizer__clip_norm=float(metrics.grad_norm) / 2)
    state, [clipped] = take_steps(half, fresh_state(half), BATCHES[:1])
    np.testing.assert_allclose(clipped.grad_norm, metrics.grad_norm, rtol=1e-6)  # reported before clipping
    norm = optax.tree.norm(gradients_after_one_step(half, state))
    np.testing.assert_allclose(norm, half.optimizer.clip_norm, rtol=1e-5)


@pytest.mark.parametrize("transport", ["ragged", "dense"])
def test_losses_are_the_same_with_every_transport(transport):
    batches = [make_batch(seed) for seed in range(20)]
    pooled, other = tiny_config(), tiny_config(ep__transport=transport)
    wanted = [m.loss for m in take_steps(pooled, fresh_state(pooled), batches)[1]]
    state, metrics = take_steps(other, fresh_state(other), batches)
    np.testing.assert_allclose([m.loss for m in metrics], wanted, rtol=1e-4)
    np.testing.assert_allclose([m.loss for m in metrics[:2]], wanted[:2], rtol=1e-5)
    assert state["step"] == 20


def test_compiles_once_also_for_a_restored_state_and_donates(tmp_path):
    config = tiny_config()
    step = make_train_step(config, mesh_of(config))
    batches = [jax.device_put(batch, NamedSharding(mesh_of(config), BATCH_SPEC)) for batch in BATCHES]
    old = fresh_state(config)
    state, _ = step(old, batches[0])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    state, _ = step(state, batches[1])

    saver = Checkpointer(tmp_path, CheckpointConfig())
    saver.save(2, state, {})  # in the background, while its buffers are donated
    straight, wanted = step(state, batches[2])
    saver.close()
    restored = restore_state(config, mesh_of(config), Point(tmp_path, 2))
    resumed, metrics = step(restored, batches[2])
    assert_same_bits(resumed, straight)
    assert_same_bits(metrics, wanted)
    assert step._cache_size() == 1


def test_tied_embeddings_share_no_buffer_in_the_state(tmp_path):
    config = tiny_config(model__tie_embeddings=True)
    state = fresh_state(config)
    saver = Checkpointer(tmp_path, CheckpointConfig())
    for number, batch in enumerate(BATCHES, start=1):
        state, [metrics] = take_steps(config, state, [batch])
        saver.save(number, state, {})
        assert metrics.all_finite
    saver.close()


@pytest.mark.parametrize(("term", "coefficient"), [("load_balance", 0.1), ("z_loss", 0.02)])
def test_each_router_loss_is_in_the_objective_and_reaches_the_router(term, coefficient):
    plain, config = tiny_config(), tiny_config(**{f"router__{term}_coefficient": coefficient})
    before, [wanted] = take_steps(plain, fresh_state(plain), BATCHES[:1])
    after, [metrics] = take_steps(config, fresh_state(config), BATCHES[:1])
    assert wanted.loss == wanted.cross_entropy
    assert max(wanted.grad_norm, metrics.grad_norm) < plain.optimizer.clip_norm  # neither gradient is scaled
    np.testing.assert_allclose(metrics.loss, wanted.loss + coefficient * getattr(wanted, term), rtol=1e-6)
    gradient, without_term = (gradients_after_one_step(plain, state)["blocks"]["layer_0"] for state in (after, before))
    moved = np.linalg.norm(gradient["moe"]["router"] - without_term["moe"]["router"])
    assert moved > 0.01 * np.linalg.norm(without_term["moe"]["router"])


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_changes_nothing(parts):
    """32 rows in 1, 2 or 4 microbatches with very different numbers of valid tokens."""
    whole = without(make_batch(B=32), [0, 1, 2, 3, 4, 5, 7, 16, 17])
    shares = whole.valid.reshape(parts, -1).sum(1)
    assert shares.max() > 1.2 * shares.min()
    states, metrics = {}, {}
    for microbatches in (1, parts):
        config = tiny_config((1, 1, 8), train__sequences_per_step=32, train__accumulation=microbatches)
        batch = jax.tree.map(lambda x, m=microbatches: x.reshape(m, 32 // m, *x.shape[2:]), whole)
        states[microbatches], [metrics[microbatches]] = take_steps(config, fresh_state(config), [batch])
    one, several = metrics[1], metrics[parts]
    for name in ("loss", "cross_entropy", "z_loss", "grad_norm"):
        np.testing.assert_allclose(getattr(several, name), getattr(one, name), rtol=1e-5)
    assert several.valid_targets == one.valid_targets == whole.valid.sum()
    np.testing.assert_array_equal(several.drops.counts_NPE, one.drops.counts_NPE)
    np.testing.assert_array_equal(states[parts]["router"]["bias"], states[1]["router"]["bias"])
    gradients, wanted = (gradients_after_one_step(config, states[m]) for m in (parts, 1))
    assert_close(gradients, wanted, 2e-5)


def test_one_bad_expert_gradient_leaves_the_state_alone_and_is_named():
    """An expert that no token takes has a NaN weight: the loss is finite, its own gradient is not."""
    config = tiny_config()
    state = jax.tree.map(np.array, jax.device_get(fresh_state(config)))
    state["router"]["bias"][:, 5] = -3.0
    state["params"]["blocks"]["layer_0"]["moe"]["expert_gate_up"][1, 5, 2, 3] = np.nan
    after, [metrics] = take_steps(config, placed(state, config), BATCHES[:1])
    assert np.isfinite(metrics.loss)
    assert metrics.loss_finite
    assert not metrics.all_finite
    bad = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, finite in jax.tree.leaves_with_path(metrics.gradients_finite)
        if not finite
    ]
    assert bad
    assert all("moe/expert_" in name for name in bad)
    assert_same_bits(after, state)  # moments, counts, bias and step included
    with pytest.raises(NonFiniteError, match=re.escape(f"step 1: gradient of {bad[0]}")):
        refuse_non_finite(1, metrics)


def test_a_loss_that_is_not_finite_leaves_the_state_alone():
    config = tiny_config()
    state = jax.tree.map(np.array, jax.device_get(fresh_state(config)))
    state["params"]["embedding"][BATCHES[0].tokens[0, 0, 0], 0] = np.inf
    after, [metrics] = take_steps(config, placed(state, config), BATCHES[:1])
    assert not metrics.loss_finite
    assert_same_bits(after, state)
    with pytest.raises(NonFiniteError, match="step 7: loss, gradient of .* and [0-9]+ more not finite"):
        refuse_non_finite(7, metrics)


def token_mean(config, batch):
    """Mean loss over the valid targets, one row at a time through the same step."""
    total, count = 0.0, 0
    for row in range(batch.valid.shape[1]):
        others = [i for i in range(batch.valid.shape[1]) if i != row]
        _, [metrics] = take_steps(config, fresh_state(config), [without(batch, others)])
        total += float(metrics.loss) * int(metrics.valid_targets)
        count += int(metrics.valid_targets)
    return total / count


def test_a_masked_row_that_is_all_of_a_device_changes_only_the_mean():
    """8 rows on 8 devices: row 3 masked leaves device 3 without a valid target."""
    config = tiny_config((1, 8, 1))
    batch = without(BATCHES[0], [3])
    _, [metrics] = take_steps(config, fresh_state(config), [batch])
    assert metrics.all_finite
    assert metrics.valid_targets == batch.valid.sum()
    np.testing.assert_allclose(metrics.loss, token_mean(config, batch), rtol=1e-6)


@pytest.mark.parametrize("mesh_shape", [(1, 8, 1), (1, 2, 4)])
def test_nothing_valid_gives_loss_and_gradients_of_zero(mesh_shape):
    config = tiny_config(mesh_shape)
    state, [metrics] = take_steps(config, fresh_state(config), [without(BATCHES[0], slice(None))])
    assert (metrics.loss, metrics.grad_norm, metrics.valid_targets) == (0.0, 0.0, 0)
    assert metrics.all_finite
    assert not metrics.drops.counts_NPE.any()
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients_after_one_step(config, state)))
    np.testing.assert_array_equal(state["router"]["bias"], 0)
    assert state["step"] == 1


def test_padding_takes_no_slot_and_adds_nothing():
    """8 rows of 32 columns, the last 16 of them padding, against 8 rows of 16, with capacities that bind."""
    short = make_batch(3)
    long = jax.tree.map(lambda x: np.pad(x, [(0, 0), (0, 0), (0, 16)]), short)
    short_config, long_config = (tiny_config(drops=True, data__sequence_length=length) for length in (16, 32))
    wanted_state, [wanted] = take_steps(short_config, fresh_state(short_config), [short])
    state, [metrics] = take_steps(long_config, fresh_state(long_config), [long])
    assert wanted.drops.counts_NPE[:, 1:].sum() > 0
    for name in ("loss", "load_balance", "z_loss", "grad_norm"):
        np.testing.assert_allclose(getattr(metrics, name), getattr(wanted, name), rtol=1e-5)
    np.testing.assert_array_equal(metrics.drops.counts_NPE, wanted.drops.counts_NPE)
    np.testing.assert_array_equal(metrics.drops.counts_NPE[:, 0].sum(-1), 2 * short.valid.sum())
    np.testing.assert_array_equal(state["router"]["bias"], wanted_state["router"]["bias"])
    gradients, wanted_gradients = (gradients_after_one_step(short_config, s) for s in (state, wanted_state))
    assert_close(gradients, wanted_gradients, 2e-5)


def test_a_valid_token_with_the_padding_id_is_routed():
    config = tiny_config()
    batch = make_batch(4)
    same_ids = batch._replace(tokens=np.full_like(batch.tokens, 258))
    _, [metrics] = take_steps(config, fresh_state(config), [same_ids])
    np.testing.assert_array_equal(metrics.drops.counts_NPE[:, 0].sum(-1), 2 * batch.valid.sum())


def test_a_vocabulary_that_no_axis_divides_has_no_extra_logits():
    batch = make_batch(5, vocab=101)
    gradients = {}
    for mesh_shape in (ONE_DEVICE, (1, 8, 1)):
        config = tiny_config(mesh_shape, model__vocab_size=101)
        state = jax.tree.map(np.array, jax.device_get(fresh_state(config)))
        state["params"]["head"][:] = 0.0
        state, [metrics] = take_steps(config, placed(state, config), [batch])
        np.testing.assert_allclose(metrics.loss, np.log(101), rtol=1e-6)
        gradients[mesh_shape] = gradients_after_one_step(config, state)
    assert_close(*gradients.values(), 1e-6)


def test_evaluation_applies_the_bias_and_changes_nothing():
    config = tiny_config()
    batch = jax.device_put(BATCHES[0], NamedSharding(mesh_of(config), BATCH_SPEC))
    as_trained, free = (make_eval_step(config, mesh_of(config), ep) for ep in (config.ep, dropless(config.ep)))
    state = fresh_state(config)
    before = jax.device_get(state)
    sums = as_trained(state["params"], state["router"]["bias"], batch)
    without_bias = sums.cross_entropy / sums.valid_targets
    np.testing.assert_allclose(
        free(state["params"], state["router"]["bias"], batch).cross_entropy, sums.cross_entropy, rtol=1e-4
    )
    pushed = state["router"]["bias"].at[:, 0].set(2.0)
    counts = as_trained(state["params"], pushed, batch).drops.counts_NPE
    np.testing.assert_array_equal(counts[:, 0, 0], BATCHES[0].valid.sum())  # every token takes the favoured expert
    assert_same_bits(state, before)
    _, [metrics] = take_steps(config, state, BATCHES[:1])
    np.testing.assert_allclose(without_bias, metrics.cross_entropy, rtol=1e-6)


def test_dropless_has_no_capacity_whatever_the_settings():
    config = tiny_config(drops=True, ep__sender_factor=0.25, ep__receiver_factor=0.25)
    batch = jax.device_put(BATCHES[0], NamedSharding(mesh_of(config), BATCH_SPEC))
    state = fresh_state(config)
    dropped, free = (
        make_eval_step(config, mesh_of(config), ep)(state["params"], state["router"]["bias"], batch).drops.counts_NPE
        for ep in (config.ep, dropless(config.ep))
    )
    assert dropped[:, 1:].sum() > 0
    assert free[:, 1:].sum() == 0
    np.testing.assert_array_equal(free[:, 0], dropped[:, 0])


def traced(config):
    mesh = mesh_of(config)
    return make_train_step(config, mesh).trace(state_target(config, mesh), make_batch())


@pytest.mark.parametrize(("remat", "waves", "per_wave"), [("none", 1, 4), ("exchanges", 2, 4), ("full", 2, 6)])
def test_exchanges_of_the_whole_step(remat, waves, per_wave):
    """The layers are one scan, so the program holds one layer's all-to-alls forward and backward."""
    text = traced(tiny_config(model__remat=remat, ep__waves=waves)).lower().as_text()
    assert text.count("stablehlo.all_to_all") == per_wave * waves


def test_the_policy_products_repeats_attention_alone():
    count = {
        remat: traced(tiny_config(model__remat=remat)).lower().as_text().count("dot_general")
        for remat in ("none", "products", "full")
    }
    assert count["products"] == count["none"] + 2  # scores, and scores times values
    assert count["full"] > count["products"] + 5


@pytest.mark.parametrize("remat", ["exchanges", "products"])
def test_keeping_only_some_results_changes_no_number(one_device, remat):
    config = tiny_config(model__remat=remat)
    _, metrics = take_steps(config, fresh_state(config), BATCHES)
    np.testing.assert_allclose([m.loss for m in metrics], [m.loss for m in one_device[1]], rtol=1e-5)


def test_unrolled_blocks_give_the_numbers_of_the_loop():
    """With microbatches, blocks of two layers, a window and padding, on a mesh with every axis."""
    batches = [make_batch(seed, M=2, B=4) for seed in range(2)]
    changes = {"train__accumulation": 2, "model__num_layers": 4, "model__global_every": 2, "model__window": 3}
    results = []
    for scan in (True, False):
        config = tiny_config((1, 2, 2), model__remat="products", model__scan=scan, **changes)
        results.append(take_steps(config, fresh_state(config), batches))
    (looped, wanted), (unrolled, found) = results
    np.testing.assert_allclose([m.loss for m in found], [m.loss for m in wanted], rtol=1e-6)
    np.testing.assert_allclose([m.grad_norm for m in found], [m.grad_norm for m in wanted], rtol=1e-5)
    assert_close(unrolled["params"], looped["params"], 1e-5)


def test_recomputing_saves_memory_without_a_loop_too():
    """XLA takes a recomputed value for the one that it has already, unless it is kept from that."""
    temporaries = {}
    for remat in ("none", "full"):
        config = tiny_config(
            ONE_DEVICE, model__scan=False, model__remat=remat, model__num_layers=6, data__sequence_length=128
        )
        temporaries[remat] = compiled_step(config).memory_analysis().temp_size_in_bytes
    assert temporaries["full"] < 0.5 * temporaries["none"], temporaries


@pytest.mark.parametrize("transport", ["pooled_wave", "fixed_cell", "ragged", "rowwise", "ring", "dense"])
def test_no_sum_depends_on_the_order_of_threads(transport):
    """Scatter-adds of floats are the embedding's, and none has two rows for one place, which GPUs add as they come."""
    found = float_scatter_adds(traced(tiny_config(ep__transport=transport)).jaxpr.jaxpr)
    shapes = [(scatter.outvars[0].aval.shape, scatter.outvars[0].aval.dtype) for scatter in found]
    assert shapes == [((259, 32), jnp.float32)] * 2
    assert all(scatter.params["unique_indices"] for scatter in found)


@pytest.mark.parametrize("transport", ["pooled_wave", "fixed_cell", "ragged", "rowwise", "ring", "dense"])
def test_cpu_processes_do_without_reduce_scatter(monkeypatch, transport):
    """Gloo's is wrong now and then, without an error: neither a step nor what XLA makes of it may have one."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    lowered = traced(tiny_config(ep__transport=transport)).lower()
    assert "stablehlo.reduce_scatter" not in lowered.as_text()
    if transport == "ring":
        assert "reduce-scatter" not in lowered.compile().as_text()
    monkeypatch.undo()
    assert "stablehlo.reduce_scatter" in traced(tiny_config(ep__transport=transport)).lower().as_text()


def test_phases_are_named_in_the_compiled_program():
    names = re.findall(r'op_name="([^"]*)"', compiled_step(tiny_config()).as_text())
    for phase in ("route", "dispatch", "experts", "combine", "router", "attention"):
        assert any(f"/{phase}/" in name for name in names), phase
    exchanges = [name for name in names if name.endswith("/all_to_all")]
    assert all("/dispatch/" in name or "/combine/" in name or "transpose(" in name for name in exchanges)
    assert exchanges
