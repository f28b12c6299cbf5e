"""The whole model inside one shard_map: same losses on every mesh, remat policy and option; gradients of every term.

The routed experts here are a dense stand-in, so nothing depends on a transport.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ep_jax import mesh as meshes
from ep_jax.data.sequences import Batch
from ep_jax.fields import ConfigError
from ep_jax.model.config import ModelConfig, RouterConfig
from ep_jax.model.transformer import forward, init_params, initial_router_state, parameter_kinds

MODEL = ModelConfig(
    vocab_size=101, num_layers=2, model_dim=16, num_heads=4, num_kv_heads=2, head_dim=8,
    latent_dim=8, expert_hidden_dim=8, num_shared_experts=1, shared_hidden_dim=8, init_std=0.2,
)  # fmt: skip
ROUTER = RouterConfig(num_experts=8, experts_per_token=2, histogram_bins=64)
MESHES = [(1, 1, 8), (1, 2, 4), (1, 1, 1), (2, 4, 1)]
B, L = 8, 12
QUICK_COMPILE = {"xla_backend_optimization_level": 0}


class Drops(NamedTuple):
    valid_in_group: jax.Array
    valid: jax.Array


class Result(NamedTuple):
    losses: dict  # of the whole batch
    grads: dict
    counts: jax.Array  # [layers, E]
    drops: Drops


def make_rows(seed=0):
    """Two documents a row, then up to 3 tokens of padding."""
    rng = np.random.default_rng(seed)
    index = np.arange(L)[None, :]
    cut, end = rng.integers(3, 7, (B, 1)), rng.integers(L - 3, L + 1, (B, 1))
    valid = index < end
    segments = np.where(valid, 1 + (index >= cut), 0)
    positions = np.where(valid, index - np.where(index >= cut, cut, 0), 0)
    tokens = rng.integers(0, MODEL.vocab_size, (B, L + 1))
    ints = [np.where(valid, tokens[:, :-1], 0), np.where(valid, tokens[:, 1:], 0), valid, segments, positions]
    return Batch(*(array if array.dtype == bool else array.astype(np.int32) for array in ints))


def dense_experts(rows, ids, weights, valid, w_gate_up, w_down, *, sequence_length, valid_in_group):
    """Every expert for every row; no row travels, the expert weights do."""
    assert sequence_length == L
    w_gate_up, w_down = (lax.all_gather(w, "ep", tiled=True) for w in (w_gate_up, w_down))
    gate, up = jnp.split(jnp.einsum("th,ehf->etf", rows, w_gate_up), 2, axis=-1)
    results = jnp.einsum("etf,efh->eth", jax.nn.silu(gate) * up, w_down)
    chosen = jax.nn.one_hot(ids, w_gate_up.shape[0]) * jnp.where(valid[:, None], weights, 0.0)[:, :, None]
    combined = jnp.einsum("tke,eth->th", chosen, results.astype(jnp.float32)).astype(rows.dtype)
    return combined, Drops(valid_in_group, jnp.sum(valid, dtype=jnp.int32))


@functools.cache
def initial(model=MODEL, router=ROUTER, seed=0):
    """Initial parameters on the host, shared by the tests: copy before changing."""
    return jax.device_get(
        jax.jit(lambda seed: init_params(model, router, seed)[0], compiler_options=QUICK_COMPILE)(seed)
    )


@functools.cache
def compiled_step(mesh_shape, model, router):
    """The jitted step of a mesh and config, and the specs of its parameters."""
    size = int(np.prod(mesh_shape))
    config = meshes.MeshConfig(**dict(zip(meshes.AXES, mesh_shape, strict=True)))
    mesh = meshes.make_mesh(config, jax.devices()[:size])
    kinds = parameter_kinds(model, router)
    shapes = jax.eval_shape(lambda: init_params(model, router, 0)[0])
    specs = meshes.param_specs(kinds, shapes)

    def local_step(params, bias, rows):
        valid_total = lax.psum(jnp.sum(rows.valid), meshes.AXES).astype(jnp.float32)

        def objective(params):
            outputs = forward(
                params, bias, rows, model=model, router=router, valid_total=valid_total, routed_experts=dense_experts
            )
            return outputs.objective(router), outputs

        grads, outputs = jax.grad(objective, has_aux=True)(params)
        losses = {name: getattr(outputs, name) for name in ("cross_entropy", "load_balance", "z_loss")}
        losses["objective"] = outputs.objective(router)
        drops = jax.tree.map(lambda leaf: meshes.varying(leaf)[None], outputs.drops)
        return Result(*lax.psum((losses,), meshes.AXES), grads, lax.psum(outputs.router.counts, meshes.AXES), drops)

    step = jax.shard_map(
        local_step, mesh=mesh, in_specs=(specs, P(), P(meshes.AXES)), out_specs=Result(P(), specs, P(), P(meshes.AXES))
    )
    return jax.jit(step, compiler_options=QUICK_COMPILE)


def run(mesh_shape=(1, 2, 4), model=MODEL, router=ROUTER, *, rows=None, params=None, bias=None):
    params = initial(model, router) if params is None else params
    bias = initial_router_state(model, router)["bias"] if bias is None else bias
    return jax.device_get(compiled_step(mesh_shape, model, router)(params, bias, make_rows() if rows is None else rows))


def assert_close(got, wanted, tolerance):
    """Largest error over largest reference, leaf by leaf."""

    def compare(path, a, b):
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-6), jax.tree_util.keystr(path)

    jax.tree.map_with_path(compare, got, wanted)


@pytest.mark.parametrize("mesh_shape", [shape for shape in MESHES if shape != (1, 1, 1)])
def test_losses_and_gradients_are_the_same_on_every_mesh(mesh_shape):
    one, many = run((1, 1, 1)), run(mesh_shape)
    assert_close(many.losses, one.losses, 1e-5)
    assert_close(many.grads, one.grads, 2e-5)
    np.testing.assert_array_equal(many.counts, one.counts)


def test_counts_and_valid_tokens_add_up():
    rows, result = make_rows(), run((1, 2, 4))
    assert result.counts.dtype == np.int32
    np.testing.assert_array_equal(result.counts.sum(-1), [rows.valid.sum() * 2] * MODEL.num_layers)
    per_device = rows.valid.sum(-1)
    np.testing.assert_array_equal(result.drops.valid, np.repeat(per_device[:, None], MODEL.num_layers, 1))
    groups = per_device.reshape(2, 4).sum(-1)
    np.testing.assert_array_equal(result.drops.valid_in_group[:, 0], np.repeat(groups, 4))


@pytest.mark.parametrize("policy", ["full", "exchanges", "products"])
def test_remat_changes_nothing(policy):
    plain, recomputed = run(), run(model=dataclasses.replace(MODEL, remat=policy))
    assert_close(recomputed.losses, plain.losses, 1e-6)
    assert_close(recomputed.grads, plain.grads, 1e-6)


def test_each_loss_term_reaches_the_routers_gradient():
    """The objective is the weighted sum of what is logged, and each term moves the router."""
    terms = [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5)]
    results = [
        run(router=dataclasses.replace(ROUTER, load_balance_coefficient=a, z_loss_coefficient=b)) for a, b in terms
    ]
    for (a, b), result in zip(terms, results, strict=True):
        losses = result.losses
        expected = losses["cross_entropy"] + a * losses["load_balance"] + b * losses["z_loss"]
        np.testing.assert_allclose(losses["objective"], expected, rtol=1e-6)
    none, balance, z = (result.grads["blocks"]["layer_0"]["moe"]["router"] for result in results)
    for gradient in (none, balance - none, z - none):
        assert np.abs(gradient).max() > 1e-4


def test_balance_loss_is_per_layer_and_scanned():
    """BL-21: layer 0 sends all to expert 0, layer 1 to expert 1, through the real scan: mean 2.0, not 1.0."""
    router = dataclasses.replace(ROUTER, num_experts=2, experts_per_token=1, scores="softmax", balancing="none")
    # Every token is the vector of ones, layers add nothing to it, and each layer's router prefers another expert.
    params = jax.tree.map(np.zeros_like, initial(MODEL, router))
    params["embedding"] += 1
    layer = params["blocks"]["layer_0"]
    layer["moe_norm"] += 1
    layer["moe"]["router"][0, :, 0] = layer["moe"]["router"][1, :, 1] = 2.0  # logits 32 apart
    result = run(router=router, params=params, mesh_shape=(1, 4, 2))
    valid = make_rows().valid.sum()
    np.testing.assert_array_equal(result.counts, [[valid, 0], [0, valid]])
    np.testing.assert_allclose(result.losses["load_balance"], 2.0, rtol=1e-5)


def test_the_bias_is_applied_and_left_alone():
    """A large bias moves every choice of its layer; forward hands back no new one, so evaluation cannot update it."""
    bias = np.zeros((MODEL.num_layers, 8), np.float32)
    bias[1, 5] = 3.0
    counts = run(bias=bias).counts
    assert counts[1, 5] == make_rows().valid.sum()
    np.testing.assert_array_equal(counts[0], run().counts[0])


def test_later_tokens_and_other_documents_change_no_earlier_loss():
    """With capacity out of the way: only the tokens up to the last counted target matter."""
    rows = make_rows()
    early = rows._replace(valid=rows.valid & (np.arange(L) < 3))
    base = run(rows=early).losses["cross_entropy"]
    later = np.where(np.arange(L)[None, :] >= 3, (rows.tokens + 7) % MODEL.vocab_size, rows.tokens).astype(np.int32)
    np.testing.assert_array_equal(run(rows=early._replace(tokens=later)).losses["cross_entropy"], base)
    first = np.where(np.arange(L)[None, :] < 3, (rows.tokens + 7) % MODEL.vocab_size, rows.tokens).astype(np.int32)
    assert run(rows=early._replace(tokens=first)).losses["cross_entropy"] != base
    second = rows._replace(valid=rows.segments == 2)
    document = run(rows=second).losses["cross_entropy"]
    np.testing.assert_array_equal(run(rows=second._replace(tokens=first)).losses["cross_entropy"], document)


def test_zero_head_gives_the_log_of_the_unpadded_vocabulary():
    """BL-45: vocabulary 101 over 8 shards."""
    params = dict(initial(), head=np.zeros_like(initial()["head"]))
    many, one = run((1, 2, 4), params=params), run((1, 1, 1), params=params)
    np.testing.assert_allclose(many.losses["cross_entropy"], np.log(101), rtol=1e-6)
    assert_close(many.grads["head"], one.grads["head"], 1e-5)


def test_a_masked_row_is_left_out_of_the_mean():
    """BL-65: row 3, the whole part of one device, has no target."""
    rows = make_rows()
    others = rows._replace(valid=rows.valid & (np.arange(B) != 3)[:, None])
    only = rows._replace(valid=rows.valid & (np.arange(B) == 3)[:, None])
    loss, counts = (
        [f(r) for r in (rows, others, only)] for f in (lambda r: run(rows=r).losses, lambda r: r.valid.sum())
    )
    total = loss[1]["cross_entropy"] * counts[1] + loss[2]["cross_entropy"] * counts[2]
    np.testing.assert_allclose(loss[0]["cross_entropy"] * counts[0], total, rtol=1e-6)


def test_no_target_anywhere_gives_zero_loss_and_zero_gradients():
    rows = make_rows()
    result = run(rows=rows._replace(valid=np.zeros_like(rows.valid)))
    assert result.losses["objective"] == 0
    assert all(not leaf.any() for leaf in jax.tree.leaves(result.grads))


def test_tied_embeddings_are_input_and_head():
    model = dataclasses.replace(MODEL, tie_embeddings=True, loss_chunk_tokens=5)
    params = initial(model)
    assert "head" not in params
    untied = dict(params, head=params["embedding"].T)
    tied, apart = run(model=model), run(params=untied)
    assert_close(tied.losses, apart.losses, 1e-5)
    assert_close(tied.grads["embedding"], apart.grads["embedding"] + apart.grads["head"].T, 2e-5)


def test_latent_width_equal_to_the_model_width_has_no_projection():
    model = dataclasses.replace(MODEL, latent_dim=16, num_shared_experts=0)
    params = initial(model)
    names = set(params["blocks"]["layer_0"]["moe"])
    assert names == {"router", "expert_gate_up", "expert_down"}
    assert params["blocks"]["layer_0"]["moe"]["expert_gate_up"].shape == (2, 8, 16, 16)
    assert all(leaf.any() for leaf in jax.tree.leaves(run(model=model).grads))


def test_every_parameter_has_a_gradient():
    jax.tree.map_with_path(lambda path, leaf: leaf.any() or pytest.fail(jax.tree_util.keystr(path)), run().grads)


def test_bfloat16_compute_is_near_float32_and_keeps_float32_gradients():
    wide, narrow = run(), run(model=dataclasses.replace(MODEL, compute_dtype="bfloat16"))
    np.testing.assert_allclose(narrow.losses["cross_entropy"], wide.losses["cross_entropy"], rtol=0.02)
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow.grads)} == {np.dtype("float32")}


def lowered_text(model, debug_info=False):
    shapes = jax.eval_shape(lambda: init_params(model, ROUTER, 0)[0])
    bias = jax.ShapeDtypeStruct((model.num_layers, 8), jnp.float32)
    return compiled_step((1, 2, 4), model, ROUTER).lower(shapes, bias, make_rows()).as_text(debug_info=debug_info)


def test_blocks_alternate_local_and_global_layers():
    """Two layers a block: with a window as long as the row they equal two blocks of one layer; a short one differs."""
    params = initial()
    layers = params["blocks"]["layer_0"]
    blocks = {f"layer_{i}": jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], layers) for i in range(2)}
    wide, narrow = (
        run(model=dataclasses.replace(MODEL, global_every=2, window=window), params=dict(params, blocks=blocks))
        for window in (L, 3)
    )
    plain = run()
    assert_close(wide.losses, plain.losses, 1e-5)
    np.testing.assert_array_equal(wide.counts, plain.counts)
    assert abs(narrow.losses["cross_entropy"] - plain.losses["cross_entropy"]) > 1e-5


def test_program_size_does_not_grow_with_depth():
    sizes = [len(lowered_text(dataclasses.replace(MODEL, num_layers=n))) for n in (2, 8)]
    assert sizes[1] < 1.2 * sizes[0]


def test_phases_are_named_in_the_program():
    text = lowered_text(MODEL, debug_info=True)
    for scope in ("router", "attention", "shared_experts", "latent", "loss"):
        assert f"{scope}/" in text or f"({scope})" in text


@pytest.mark.parametrize("mesh_shape", MESHES[:3])
def test_initial_values_are_the_same_on_every_mesh(mesh_shape):
    params, kinds = initial(seed=3), parameter_kinds(MODEL, ROUTER)
    config = meshes.MeshConfig(**dict(zip(meshes.AXES, mesh_shape, strict=True)))
    mesh = meshes.make_mesh(config, jax.devices()[: config.size])
    placed = jax.jit(
        lambda seed: init_params(MODEL, ROUTER, seed)[0],
        out_shardings=meshes.shardings(mesh, meshes.param_specs(kinds, params)),
        compiler_options=QUICK_COMPILE,
    )(3)
    jax.tree.map(np.testing.assert_array_equal, placed, params)


def test_initial_values_have_the_documented_spread_and_differ_between_seeds():
    model = dataclasses.replace(MODEL, model_dim=64, latent_dim=32, init_std=0.05)
    params, kinds = initial(model), parameter_kinds(model, ROUTER)
    assert jax.tree.structure(params) == jax.tree.structure(kinds)
    layer = params["blocks"]["layer_0"]
    scaled = 0.05 / np.sqrt(2 * model.num_layers)
    expected = [
        (params["embedding"], 0.05), (params["head"], 0.05), (layer["attention"]["query"], 0.05),
        (layer["attention"]["output"], scaled), (layer["moe"]["expert_gate_up"], 0.05),
        (layer["moe"]["expert_down"], scaled), (layer["moe"]["shared_down"], scaled),
        (layer["moe"]["latent_up"], scaled), (layer["moe"]["router"], 1 / 8),
    ]  # fmt: skip
    for value, std in expected:
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(np.std(value), std, rtol=0.1)
        assert np.abs(value).max() <= 2.28 * std
    assert (layer["moe_norm"] == 1).all()
    assert not np.array_equal(layer["moe"]["router"][0], layer["moe"]["router"][1])
    assert not np.array_equal(initial(model, seed=1)["head"], params["head"])


def test_kinds_decide_the_placement_of_every_parameter():
    kinds = parameter_kinds(MODEL, ROUTER)
    moe = kinds["blocks"]["layer_0"]["moe"]
    assert (kinds["embedding"], kinds["head"], kinds["final_norm"]) == ("embedding", "head", "norm")
    assert (moe["router"], moe["expert_down"], moe["latent_up"]) == ("router", "expert", "dense")
    assert set(jax.tree.leaves(kinds)) == set(meshes.PLACEMENTS)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"window": 4}, "model.window"),
        ({"attention": "cudnn"}, "model.attention"),
        ({"num_heads": 3, "num_kv_heads": 2}, "model.num_kv_heads"),
        ({"num_layers": 3, "global_every": 2}, "model.global_every"),
        ({"latent_dim": 256}, "model.latent_dim"),
        ({"head_dim": 7}, "model.head_dim"),
    ],
)
def test_refused_settings_name_the_key(settings, key):
    with pytest.raises(ConfigError, match=key) as error:
        ModelConfig(**settings)
    assert "\n" not in str(error.value)
