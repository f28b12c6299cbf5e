"""The whole layer with the Triton kernels, interpreted, against the same layer by XLA, on four devices and with drops.

The layer by XLA is held against the NumPy oracle in tests/ep; here only what is swapped is on trial.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels import grouped_mlp
from jax.sharding import AxisType

from ep_jax.ep import EPConfig, implementations, routed_experts
from ep_jax.ep.drops import INVALID
from tests.kernels import numpy_tensor

SEQUENCE, TOKENS, K, E, H, F = 8, 32, 3, 4, 16, 8


@pytest.fixture
def kernels(ops, monkeypatch):
    """Makes the layer take the kernels, and counts the programs that ran, by name."""
    import jax_triton

    ran, lock = {}, threading.Lock()  # the interpreter has one state for all threads

    def run(*arrays, **given):
        with lock:
            ran[given["kernel"].__name__] = ran.get(given["kernel"].__name__, 0) + 1
            return numpy_tensor.interpreted_call(*map(jnp.asarray, arrays), **given)

    def call(*arrays, out_shape, **given):
        return jax.pure_callback(lambda *values: run(*values, out_shape=out_shape, **given), out_shape, *arrays)

    monkeypatch.setattr(jax_triton, "triton_call", call)
    monkeypatch.setattr(implementations, "why_no_kernels", lambda: "")
    return ran


@pytest.mark.parametrize(
    ("settings", "dtype", "tolerance"),
    [
        # The interpreter multiplies no bfloat16.
        (dict(transport="pooled_wave", sender_factor=0.9, receiver_factor=0.9), jnp.float16, 5e-3),
        (dict(transport="pooled_wave", sender_factor=0.9, receiver_factor=1.4), jnp.float16, 5e-3),
        (dict(transport="pooled_wave", sender_factor=0.9, receiver_factor=0.9), jnp.float32, 2e-5),
        (dict(sender_factor=0.9, receiver_factor=0.9, receive="pool", waves=2), jnp.float32, 2e-5),
        (dict(slots="token", sender_factor=0.9, receiver_factor=0.9), jnp.float16, 5e-3),
        (dict(slots="token", sender_factor=0.6, receiver_factor=1.4), jnp.float16, 5e-3),
        (dict(slots="token", sender_factor=0.9, receiver_factor=0.9, receive="pool", waves=2), jnp.float32, 2e-5),
        (dict(slots="token", sender_factor=0.9, receiver_factor=0.9, receive="pool", rescale=True), jnp.float32, 2e-5),
        (dict(transport="dense"), jnp.float32, 2e-5),
        (dict(transport="fixed_cell", sender_factor=1.0), jnp.float32, 2e-5),
        (dict(transport="ragged", receiver_factor=0.8), jnp.float32, 2e-5),
        (dict(transport="ring", receiver_factor=0.8), jnp.float32, 2e-5),
    ],
    ids=[
        *("float16", "padded", "float32", "pool"),
        *("token-float16", "token-padded", "token-pool", "token-rescaled", "dense"),
        *("fixed_cell", "ragged", "ring"),
    ],
)
def test_layer_with_kernels_equals_layer_by_xla(request, kernels, monkeypatch, settings, dtype, tolerance):
    monkeypatch.setattr(grouped_mlp.op, "LOST_ROWS", 3)  # experts have few rows here, of which whole groups add up to 3
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    ids = jnp.asarray(np.argsort(rng.gumbel(size=(TOKENS, E)) + rng.normal(size=E))[:, :K], jnp.int32)
    valid = jnp.asarray(rng.random(TOKENS) < 0.9)
    arguments = (
        normal(TOKENS, H),
        normal(TOKENS, K).astype(jnp.float32),
        normal(E, H, 2 * F) * dtype(H**-0.5),
        normal(E, F, H) * dtype(F**-0.5),
    )
    d_out = normal(TOKENS, H)
    axes = ("replica", "fsdp", "ep")  # rows vary over all of them, expert weights over ep alone
    mesh = jax.make_mesh((1, 2, 2), axes, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:4])

    def layer(by):
        def objective(rows, weights, w_gate_up, w_down):
            out, report = routed_experts(
                rows,
                ids,
                weights,
                valid,
                w_gate_up,
                w_down,
                sequence_length=SEQUENCE,
                mesh=mesh,
                settings=EPConfig(kernels=by, **settings),
            )
            return jnp.sum((out * d_out).astype(jnp.float32)), (out, report.fate_TK)

        return jax.device_get(jax.jit(jax.value_and_grad(objective, (0, 1, 2, 3), has_aux=True))(*arguments))

    ((_, (right, right_fate)), right_gradients), ran_by_xla = layer("xla"), sum(kernels.values())
    ((_, (found, fate)), gradients) = layer("auto")
    assert ran_by_xla == 0
    case = request.node.callspec.id
    assert {"spread_rows_kernel", "combine_rows_kernel"} <= set(kernels)
    # Rows of one place each, and with small pools fewer places than rows.
    gathers = case in ("float16", "padded", "float32", "pool", "token-pool")
    assert ("gather_rows_kernel" in kernels) == gathers
    weighted_by_experts = case in ("token-float16", "token-padded", "token-pool", "dense")  # rescaled at the source
    assert ("combine_rows_gradient_kernel" in kernels) == (not weighted_by_experts)
    by_xla = case in ("float32", "fixed_cell")  # experts at a fixed distance, exact or with gaps
    assert ("grouped_weight_gradient_kernel" in kernels) == (not by_xla)
    has_little_padding = case in ("float16", "token-float16")
    assert ("grouped_matmul_kernel" in kernels) == (not by_xla and not has_little_padding)
    assert (len(np.unique(fate[fate != INVALID])) > 1) == (case != "dense")
    np.testing.assert_array_equal(fate, right_fate)
    for name, one, other in zip(
        ("out", "rows", "weights", "w_gate_up", "w_down"), (found, *gradients), (right, *right_gradients), strict=True
    ):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max(), err_msg=name)
