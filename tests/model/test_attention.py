"""Attention against a NumPy float64 loop, and what it may never look at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from ep_jax.fields import ConfigError
from ep_jax.model import attention, flash
from ep_jax.model.attention import attend, choose_kernel
from ep_jax.model.config import ModelConfig
from ep_jax.model.norms import rms_norm
from ep_jax.model.rope import rotate

SEGMENTS = np.array([[1] * 5 + [2] * 6 + [0] * 1, [1] * 12])


def may_see(segments_L, i, j, window):
    return j <= i and segments_L[i] == segments_L[j] and (window == 0 or i - j < window)


def reference_attend(q, k, v, segments, window):
    """Loops over every query and head in float64."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    b, L, N, h = q.shape
    out = np.zeros_like(q)
    for s in range(b):
        for n in range(N):
            group = n // (N // k.shape[2])
            for i in range(L):
                seen = [j for j in range(L) if may_see(segments[s], i, j, window)]
                scores = np.array([q[s, i, n] @ k[s, j, group] for j in seen]) / np.sqrt(h)
                weights = np.exp(scores - scores.max())
                out[s, i, n] = (weights / weights.sum()) @ v[s, seen, group]
    return out


def random_qkv(seed=0, N=4, G=2, h=8):
    rng = np.random.default_rng(seed)
    b, L = SEGMENTS.shape
    return [jnp.asarray(rng.normal(size=(b, L, heads, h)), jnp.float32) for heads in (N, G, G)]


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_xla_kernel_equals_the_loop(window, kv_heads):
    q, k, v = random_qkv(G=kv_heads)
    out = attend(q, k, v, jnp.asarray(SEGMENTS), window=window, kernel="xla")
    np.testing.assert_allclose(out, reference_attend(q, k, v, SEGMENTS, window), atol=2e-6)


@pytest.mark.parametrize("window", [0, 3])
def test_query_blocks_change_nothing(window, monkeypatch):
    q, k, v = random_qkv()

    def loss(q, k, v):
        return jnp.sum(attend(q, k, v, jnp.asarray(SEGMENTS), window=window, kernel="xla") ** 2)

    whole = jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    blocked = jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), whole, blocked)


@pytest.mark.parametrize("window", [0, 3])
def test_output_depends_on_exactly_the_tokens_it_may_see(window):
    """Neither a later token, nor another document, nor one beyond the window; but every other one."""
    q, k, _ = random_qkv(N=2, G=1, h=4)
    jacobian = jax.jacobian(lambda kv: attend(q, kv, kv, jnp.asarray(SEGMENTS), window=window, kernel="xla"))(k)
    touched = np.any(np.asarray(jacobian) != 0, axis=(2, 3, 6, 7))  # [b, i, b, j]
    b, L = SEGMENTS.shape
    for s in range(b):
        expected = [[may_see(SEGMENTS[s], i, j, window) for j in range(L)] for i in range(L)]
        np.testing.assert_array_equal(touched[s, :, s], expected)
        assert not touched[s, :, 1 - s].any()


def test_rotation_is_a_complex_product_and_depends_on_distance_alone():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1, 6, 2, 8))
    positions = np.array([[0, 1, 2, 0, 1, 2]])
    out = rotate(jnp.asarray(x, jnp.float32), jnp.asarray(positions), theta=100.0)
    angles = positions[:, :, None, None] * 100.0 ** (-np.arange(4) / 4)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag], -1), atol=1e-5)

    q, k = jnp.asarray(x[:, :1], jnp.float32), jnp.asarray(x[:, 1:2], jnp.float32)
    scores = [
        jnp.sum(rotate(q, jnp.array([[at + 3]]), 100.0) * rotate(k, jnp.array([[at]]), 100.0)) for at in (0, 5, 40)
    ]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-4)


def test_rms_norm_is_float32_inside_and_keeps_the_dtype():
    x = np.random.default_rng(2).normal(size=(3, 5, 16)) * 100
    scale = np.linspace(0.5, 2, 16)
    expected = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale
    out = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32), 1e-6)
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    narrow = rms_norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale, jnp.float32), 1e-6)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), expected, rtol=0.02)


def test_kernel_choice():
    assert choose_kernel(ModelConfig(compute_dtype="bfloat16"), 16) == "xla"  # these tests run on CPU
    with pytest.raises(ConfigError, match="model.attention = 'cudnn': it is for GPUs; allowed here is auto or xla"):
        choose_kernel(ModelConfig(attention="cudnn", compute_dtype="bfloat16"), 16)


def test_tokamax_is_refused_where_it_cannot_run():
    with pytest.raises(ConfigError, match="model.attention = 'tokamax'.*Hopper.*allowed here is auto") as error:
        choose_kernel(ModelConfig(attention="tokamax", compute_dtype="bfloat16"), 16)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("window", [0, 3])
def test_first_keys_are_those_that_a_loop_finds(window):
    first = np.asarray(flash.first_keys(jnp.asarray(SEGMENTS), window))
    for segments_L, first_L in zip(SEGMENTS, first, strict=True):
        for i, found in enumerate(first_L):
            assert found == next(j for j in range(i + 1) if may_see(segments_L, i, j, window))


def test_tokamax_runs_inside_shard_map_and_a_kept_result_is_not_computed_again(monkeypatch):
    """The program for a Hopper GPU: one forward kernel and the two of its derivative, under a remat policy."""
    from tokamax._src import gpu_utils

    for name, answer in (("has_mosaic_gpu_support", True), ("is_sm90", True), ("is_sm80", False), ("is_sm100", False)):
        monkeypatch.setattr(gpu_utils, name, lambda *_, answer=answer: answer)
    mesh = AbstractMesh((2,), ("ep",), axis_types=(AxisType.Auto,))
    attend_remat = jax.checkpoint(
        flash.attend, policy=jax.checkpoint_policies.save_only_these_names(flash.RESIDUAL_NAME)
    )

    def local(q, k, v, segments, d_out):
        out, pull = jax.vjp(lambda *qkv: attend_remat(*qkv, flash.first_keys(segments, 0)), q, k, v)
        return out, *pull(d_out)

    def heads(number):
        return jax.ShapeDtypeStruct((4, 256, number, 64), jnp.bfloat16)

    step = jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec("ep"),) * 5, out_specs=(PartitionSpec("ep"),) * 4)
    arguments = (heads(4), heads(2), heads(2), jax.ShapeDtypeStruct((4, 256), jnp.int32), heads(4))
    program = jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("custom_call @mosaic_gpu") == 3
    assert program.count("call @_forward_kernel") == 1
