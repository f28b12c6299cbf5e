"""Float32 products of bfloat16 activations against float64, inside and outside shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from ep_jax.model.exact import bfloat16_parts, float32_product


def arrays(dtype, T=96, D=256, E=24):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(T, D)), dtype)
    weight = jnp.asarray(rng.normal(size=(D, E)) * D**-0.5, jnp.float32)
    d_out = jnp.asarray(rng.normal(size=(T, E)) * np.exp2(rng.integers(-20, 0, (T, E))), jnp.float32)
    return x, weight, d_out


def test_three_parts_are_the_number_itself():
    x = np.random.default_rng(0).normal(size=4096).astype(np.float32) * np.exp2(np.arange(4096) % 64 - 32)
    parts = jax.jit(lambda x: bfloat16_parts(x, 3))(jnp.asarray(x, jnp.float32))
    assert all(part.dtype == jnp.bfloat16 for part in parts)
    np.testing.assert_array_equal(sum(np.asarray(part, np.float64) for part in parts), x.astype(np.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_product_and_weight_gradient_are_as_exact_as_float32(dtype):
    x, weight, d_out = arrays(dtype)
    out, pull = jax.vjp(float32_product, x, weight)
    d_x, d_weight = jax.jit(pull)(d_out)
    x64, weight64, d_out64 = (np.asarray(array, np.float64) for array in (x, weight, d_out))
    assert (out.dtype, d_x.dtype, d_weight.dtype) == (jnp.float32, dtype, jnp.float32)
    np.testing.assert_allclose(out, x64 @ weight64, atol=2e-6)
    np.testing.assert_allclose(d_weight, x64.T @ d_out64, atol=2e-6 * np.abs(d_out64).max() * len(x64) ** 0.5)
    expected = d_out64 @ weight64.T
    relative = 2.0**-8 if dtype == jnp.bfloat16 else 0.0  # it is rounded to the type of x
    np.testing.assert_allclose(np.asarray(d_x, np.float64), expected, rtol=relative, atol=1e-5 * np.abs(expected).max())


def test_weights_that_all_devices_share_get_the_sum_of_their_gradients():
    x, weight, d_out = arrays(jnp.bfloat16)
    mesh = jax.make_mesh((8,), ("ep",), axis_types=(AxisType.Auto,))

    def local(x, weight, d_out):
        return jax.vjp(float32_product, x, weight)[1](d_out)

    split, whole = PartitionSpec("ep"), PartitionSpec()
    step = jax.shard_map(local, mesh=mesh, in_specs=(split, whole, split), out_specs=(split, whole))
    d_x, d_weight = jax.jit(step)(x, weight, d_out)
    alone_x, alone_weight = jax.jit(lambda *a: jax.vjp(float32_product, *a[:2])[1](a[2]))(x, weight, d_out)
    np.testing.assert_array_equal(np.asarray(d_x, np.float32), np.asarray(alone_x, np.float32))
    np.testing.assert_allclose(d_weight, alone_weight, atol=1e-5)
