"""Optimizer: schedules, clipping, decay by kind, Muon on stacks and on a mesh, state placement and donation.

pytest tests/test_optimizer.py
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ep_jax.fields import ConfigError
from ep_jax.optimizer import (
    MUON_UPDATE_RMS,
    OptimizerConfig,
    gradient_norm,
    learning_rate_schedule,
    make_optimizer,
    optimizer_shardings,
    orthogonalize,
)

BLOCKS, EXPERTS = 2, 8
SHAPES = {
    "embedding": (24, 16),
    "head": (16, 24),
    "final_norm": (16,),
    "block": {
        "query": (BLOCKS, 16, 32),
        "out": (BLOCKS, 32, 16),
        "up": (BLOCKS, EXPERTS, 16, 24),
        "down": (BLOCKS, EXPERTS, 24, 16),
        "router": (BLOCKS, 16, EXPERTS),
        "norm": (BLOCKS, 16),
    },
}
KINDS = {
    "embedding": "embedding",
    "head": "head",
    "final_norm": "norm",
    "block": {
        "query": "dense",
        "out": "dense",
        "up": "expert",
        "down": "expert",
        "router": "router",
        "norm": "norm",
    },
}
SPECS = {
    "embedding": P(None, ("fsdp", "ep")),
    "head": P(("fsdp", "ep"), None),
    "final_norm": P(),
    "block": {
        "query": P(None, ("fsdp", "ep"), None),
        "out": P(None, ("fsdp", "ep"), None),
        "up": P(None, "ep", "fsdp", None),
        "down": P(None, "ep", "fsdp", None),
        "router": P(),
        "norm": P(),
    },
}
MATRICES = ("query", "out", "up", "down")


def random_tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


@functools.cache
def placements():
    mesh = jax.make_mesh((1, 2, 4), ("replica", "fsdp", "ep"), axis_types=(AxisType.Auto,) * 3)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)


def config(**changes):
    return OptimizerConfig(**{"learning_rate": 0.01, "warmup_steps": 4, **changes})


def run(tx, params, gradients):
    """Updates of each step; `params` move, on one jitted function."""
    update = jax.jit(tx.update)
    state = tx.init(params)
    all_updates = []
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        all_updates.append(updates)
    return all_updates, state


def assert_close(got, want, tolerance=2e-5):
    for path, leaf in jax.tree_util.tree_leaves_with_path(got):
        expected = functools.reduce(lambda node, key: node[key.key], path, want)
        error = np.abs(np.asarray(leaf) - np.asarray(expected)).max() / np.abs(np.asarray(expected)).max()
        assert error < tolerance, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_schedule_at_first_step_warm_up_end_and_last_step(schedule):
    rate = learning_rate_schedule(
        config(learning_rate=0.5, schedule=schedule, warmup_steps=10, final_fraction=0.2, decay_fraction=0.25), 100
    )
    assert rate(0) == pytest.approx(0.05)
    assert rate(9) == pytest.approx(0.5)
    assert rate(99) == pytest.approx(0.1)
    assert rate(1000) == pytest.approx(0.1)
    middle = {"linear": 0.5 * (1 - 0.8 * 45 / 90), "cosine": 0.5 * 0.6, "wsd": 0.5}[schedule]
    assert rate(54) == pytest.approx(middle)


def test_wsd_is_flat_then_falls_over_its_fraction():
    rate = learning_rate_schedule(
        config(learning_rate=1.0, schedule="wsd", warmup_steps=10, final_fraction=0.0, decay_fraction=0.2), 100
    )
    values = np.array([rate(count) for count in range(100)])
    np.testing.assert_allclose(values[9:80], 1.0)
    np.testing.assert_allclose(values[80:], np.linspace(0.95, 0.0, 20), atol=1e-6)


@pytest.mark.parametrize(
    ("warmup", "num_steps", "first", "last"), [(0, 10, 1.0, 0.1), (0, 1, 1.0, 1.0), (8, 4, 1 / 8, 0.5)]
)
def test_schedule_without_warm_up_and_in_runs_shorter_than_it(warmup, num_steps, first, last):
    rate = learning_rate_schedule(config(learning_rate=1.0, warmup_steps=warmup), num_steps)
    assert rate(0) == pytest.approx(first)
    assert rate(num_steps - 1) == pytest.approx(last)


def test_clipping_uses_one_norm_that_counts_every_expert_once():
    # Squared sums of 20 and 100 on two expert shards make sqrt(120) = 10.954451, not 7.236068, the mean of two norms.
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    gradients = {"expert": jnp.sqrt(jnp.array([20.0, 100.0])).reshape(2, 1, 1)}
    gradients = jax.device_put(gradients, NamedSharding(mesh, P("ep")))
    assert jax.jit(gradient_norm)(gradients) == pytest.approx(10.954451, rel=1e-6)


def test_clipped_updates_equal_those_of_gradients_scaled_by_hand():
    params, gradients = random_tree(0), [random_tree(1), random_tree(2, scale=1e-4)]
    norms = [float(np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(t)))) for t in gradients]
    scaled = [jax.tree.map(lambda g, n=n: g * min(1.0, 2.0 / n), t) for t, n in zip(gradients, norms, strict=True)]
    assert norms[0] > 2.0 > norms[1]
    # a large epsilon makes Adam's update depend on the gradient's size
    clipped, _ = run(make_optimizer(config(clip_norm=2.0, epsilon=1.0), 10, KINDS), params, gradients)
    by_hand, _ = run(make_optimizer(config(clip_norm=0.0, epsilon=1.0), 10, KINDS), params, scaled)
    assert_close(clipped[1], by_hand[1])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_reaches_weights_and_neither_norms_nor_embeddings(name):
    params = random_tree(0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    (updates,), _ = run(make_optimizer(config(name=name, weight_decay=0.5, warmup_steps=0), 10, KINDS), params, [zeros])
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        kind = functools.reduce(lambda node, key: node[key.key], path, KINDS)
        factor = 0.0 if kind in ("norm", "embedding") else -0.01 * 0.5
        param = functools.reduce(lambda node, key: node[key.key], path, params)
        np.testing.assert_allclose(update, factor * param, rtol=1e-5, err_msg=str(path))


def test_adamw_equals_optax_adamw():
    params, gradients = random_tree(0), [random_tree(1), random_tree(2)]
    ours, _ = run(make_optimizer(config(weight_decay=0.0, clip_norm=0.0), 10, KINDS), params, gradients)
    schedule = learning_rate_schedule(config(), 10)
    theirs, _ = run(optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.0), params, gradients)
    assert_close(ours[1], theirs[1])


def test_muon_equals_optax_muon_with_a_dimension_number_for_every_stack():
    params, gradients = random_tree(0), [random_tree(1), random_tree(2), random_tree(3)]
    ours, _ = run(
        make_optimizer(config(name="muon", weight_decay=0.0, clip_norm=0.0, adam_learning_rate=0.02), 10, KINDS),
        params,
        gradients,
    )
    numbers = jax.tree.map(
        lambda kind: optax.contrib.MuonDimensionNumbers(-2, -1) if kind in ("dense", "expert") else None, KINDS
    )
    theirs, _ = run(
        optax.contrib.muon(
            learning_rate_schedule(config(), 10),
            adam_learning_rate=learning_rate_schedule(config(learning_rate=0.02), 10),
            adam_b2=0.95,
            muon_weight_dimension_numbers=numbers,
            consistent_rms=MUON_UPDATE_RMS,
        ),
        params,
        gradients,
    )
    for name in MATRICES:
        assert_close(ours[2]["block"][name], theirs[2]["block"][name], tolerance=2e-4)


def singular_value_spread(updates_NMK):
    values = np.linalg.svd(np.asarray(updates_NMK, np.float64), compute_uv=False)
    return (values.max(-1) / values.min(-1)).max()


def test_muon_orthogonalises_each_matrix_of_each_stack_and_adam_does_not():
    params, gradients = random_tree(0), [random_tree(1)]
    settings = {"weight_decay": 0.0, "warmup_steps": 0}
    (muon,), _ = run(make_optimizer(config(name="muon", **settings), 10, KINDS), params, gradients)
    (adam,), _ = run(make_optimizer(config(name="adamw", **settings), 10, KINDS), params, gradients)
    for name in MATRICES:
        update = np.asarray(muon["block"][name])
        assert singular_value_spread(update) < 2.0, name
        assert singular_value_spread(adam["block"][name]) > 3.0, name
        rms = np.sqrt((update**2).mean((-2, -1)))
        np.testing.assert_allclose(rms, 0.01 * MUON_UPDATE_RMS, rtol=0.25, err_msg=name)
    assert_close(muon["head"], adam["head"])
    assert_close(muon["embedding"], adam["embedding"])
    assert_close(muon["block"]["router"], adam["block"]["router"])


def test_matrices_of_a_stack_do_not_influence_one_another():
    stack = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 6, 10)), jnp.float32)
    scaled = stack.at[1, 2].multiply(1000.0)
    alone = orthogonalize(stack[1, 2])
    np.testing.assert_allclose(orthogonalize(stack)[1, 2], alone, atol=1e-5)
    np.testing.assert_allclose(orthogonalize(scaled), orthogonalize(stack), atol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_updates_on_a_mesh_equal_those_on_one_device_and_keep_placement(name):
    params, gradients = random_tree(0), [random_tree(1), random_tree(2)]
    tx = make_optimizer(config(name=name), 10, KINDS)
    alone, _ = run(tx, params, gradients)
    shardings = placements()
    on_mesh = jax.device_put(params, shardings)
    state_shardings = optimizer_shardings(tx, params, shardings)
    update = jax.jit(tx.update, out_shardings=(shardings, state_shardings))
    state = jax.jit(tx.init, out_shardings=state_shardings)(on_mesh)
    for step, gradient in enumerate(gradients):
        updates, state = update(jax.device_put(gradient, shardings), state, on_mesh)
        on_mesh = optax.apply_updates(on_mesh, updates)
        assert_close(updates, alone[step])
    for leaf, placement in zip(jax.tree.leaves(updates), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(placement, leaf.ndim)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_shardings_follow_the_parameters(name):
    shardings = placements()
    tx = make_optimizer(config(name=name), 10, KINDS)
    shapes = jax.eval_shape(lambda: random_tree(0))
    of_state = optimizer_shardings(tx, shapes, shardings)
    assert jax.tree.structure(of_state) == jax.tree.structure(jax.eval_shape(tx.init, shapes))
    moments, counts = 0, 0
    for path, sharding in jax.tree_util.tree_leaves_with_path(of_state):
        name_of_leaf = jax.tree_util.keystr(path)
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key not in ("muon", "adam")]
        if keys:
            moments += 1
            assert sharding == functools.reduce(lambda node, key: node[key], keys, shardings), name_of_leaf
        else:
            counts += 1
            assert "count" in name_of_leaf
            assert sharding.spec == P()
    num_leaves = len(jax.tree.leaves(shapes))
    assert moments == (2 * num_leaves if name == "adamw" else 2 * num_leaves - len(MATRICES))
    assert counts >= 2


def test_muon_never_gathers_experts_over_the_ep_axis():
    shardings = placements()
    tx = make_optimizer(config(name="muon", clip_norm=0.0), 10, KINDS)
    of_state = optimizer_shardings(tx, random_tree(0), shardings)
    abstract = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), random_tree(0), shardings
    )
    state = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
        jax.eval_shape(tx.init, abstract),
        of_state,
    )
    update = jax.jit(tx.update, out_shardings=(shardings, of_state))
    text = update.lower(abstract, state, abstract).compile().as_text()
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* (?:all-gather|all-to-all|collective-permute)\(", text)
    assert gathered  # the dense matrices are gathered, so the pattern still fits XLA's text
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in gathered]
    experts_of_one_shard = BLOCKS * EXPERTS // 4 * 16 * 24  # more than any whole dense stack of these sizes
    assert max(sizes) <= experts_of_one_shard, gathered


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_is_arrays_that_share_no_buffer_and_can_be_donated(name):
    tx = make_optimizer(config(name=name), 10, KINDS)
    params = random_tree(0)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for state in (tx.init(params), jax.jit(tx.init)(params)):
        leaves = jax.tree.leaves((params, state))
        assert all(isinstance(leaf, jax.Array) for leaf in leaves)
        pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves]
        assert len(set(pointers)) == len(pointers)
    for _ in range(3):
        params, state = step(params, state, random_tree(1))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_a_restored_state_continues_the_schedule():
    kinds = {"up": "expert", "norm": "norm"}
    tx = make_optimizer(config(name="muon", warmup_steps=8), 10, kinds)
    params, *gradients = [{name: random_tree(seed)["block"][name] for name in kinds} for seed in range(5)]
    straight, _ = run(tx, params, gradients)
    update = jax.jit(tx.update)
    state = tx.init(params)
    for gradient in gradients[:2]:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    state = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, state))  # as from a checkpoint
    again = jax.jit(make_optimizer(config(name="muon", warmup_steps=8), 10, kinds).update)
    for step, gradient in enumerate(gradients[2:], start=2):
        updates, state = again(gradient, state, params)
        params = optax.apply_updates(params, updates)
        for got, want in zip(jax.tree.leaves(updates), jax.tree.leaves(straight[step]), strict=True):
            np.testing.assert_array_equal(got, want)


def test_clipping_and_schedule_do_not_change_the_state_so_a_resumed_run_may_change_them():
    one, other = (
        jax.eval_shape(make_optimizer(changed, 10, KINDS).init, random_tree(0))
        for changed in (config(clip_norm=0.0), config(clip_norm=2.0, schedule="wsd"))
    )
    assert jax.tree_util.tree_structure(one) == jax.tree_util.tree_structure(other)


def test_unknown_kinds_and_names_are_refused():
    with pytest.raises(ValueError, match=r"parameter kinds \['bias'\]: allowed are embedding"):
        make_optimizer(config(), 10, {"x": "bias"})
    with pytest.raises(ConfigError, match=r"optimizer\.name = 'lion': allowed is one of adamw, muon"):
        OptimizerConfig(name="lion")
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate = nan"):
        OptimizerConfig(learning_rate=float("nan"))
