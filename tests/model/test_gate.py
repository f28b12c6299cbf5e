"""The shared experts' activation and its derivative against float64 formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.model.latent_moe import gate


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2.0**-8)])
def test_gate_and_its_derivative(dtype, tolerance):
    rng = np.random.default_rng(0)
    hidden, d_out = (jnp.asarray(3 * rng.normal(size=(6, width)), dtype) for width in (20, 10))
    out, pull = jax.vjp(gate, hidden)
    (d_hidden,) = pull(d_out)
    x, up, d = (np.asarray(array, np.float64) for array in (hidden[:, :10], hidden[:, 10:], d_out))
    sigmoid = 1 / (1 + np.exp(-x))
    of_gate = d * up * (sigmoid + x * sigmoid * (1 - sigmoid))
    expected = np.concatenate([of_gate, d * x * sigmoid], axis=1)
    assert out.dtype == d_hidden.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), x * sigmoid * up, rtol=tolerance, atol=1e-6)
    np.testing.assert_allclose(np.asarray(d_hidden, np.float64), expected, rtol=tolerance, atol=1e-6)
