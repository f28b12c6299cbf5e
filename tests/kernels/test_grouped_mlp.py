"""SwiGLU experts in Triton's interpreter against NumPy in float64: each expert on its own, unused rows poisoned."""

from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels import call
from ep_jax_kernels.grouped_matmul.op import Launch
from ep_jax_kernels.grouped_matmul.tiles import capacity_groups, ragged_groups
from ep_jax_kernels.grouped_mlp import reference
from ep_jax_kernels.grouped_mlp.op import Methods
from ep_jax_kernels.swiglu import op as swiglu_op
from ep_jax_kernels.swiglu import reference as swiglu_reference

SIZES = (0, 1, 7, 63, 64, 65, 300)
EVEN = Launch(block_m=64, block_n=16, block_k=16, group=4, warps=4)
UNEVEN = Launch(block_m=32, block_n=64, block_k=32, group=3, warps=4)  # no block divides the widths below
LAYOUTS = {
    "ragged": (ragged_groups, 512),
    "capacity": (lambda sizes: capacity_groups(sizes, max(SIZES)), max(SIZES) * len(SIZES)),
}


def problem(layout, width, hidden, seed=0):
    """(groups, owned rows, rows, w_gate_up, w_down, d_out); NaN in rows that nobody owns."""
    group, num_rows = LAYOUTS[layout]
    groups = group(jnp.array(SIZES, jnp.int32))
    rng = np.random.default_rng(seed)
    owned = np.zeros(num_rows, bool)
    for start, size in zip(*map(np.asarray, groups), strict=True):
        owned[start : start + size] = True
    rows, d_out = rng.standard_normal((2, num_rows, width)).astype(np.float32)
    rows[~owned], d_out[~owned] = np.nan, np.nan
    w_gate_up = rng.standard_normal((len(SIZES), width, 2 * hidden)).astype(np.float32) * width**-0.5
    w_down = rng.standard_normal((len(SIZES), hidden, width)).astype(np.float32) * hidden**-0.5
    return groups, owned, rows, w_gate_up, w_down, d_out


def by_hand(groups, rows, w_gate_up, w_down, row_weights, d_out):
    """(out, d_rows, d_gate_up, d_down, d_row_weights), row by row in float64; NaN in rows that nobody owns."""
    rows, w_gate_up, w_down, row_weights, d_out = (
        array.astype(np.float64) for array in (rows, w_gate_up, w_down, row_weights, d_out)
    )
    out, d_rows, d_row_weights = (np.full(shape, np.nan) for shape in (rows.shape, rows.shape, len(rows)))
    d_gate_up, d_down = np.zeros(w_gate_up.shape), np.zeros(w_down.shape)
    for expert, (start, size) in enumerate(zip(*map(np.asarray, groups), strict=True)):
        for row in range(start, start + size):
            weight, (gate, up) = row_weights[row], np.split(rows[row] @ w_gate_up[expert], 2)
            sigmoid = 1 / (1 + np.exp(-gate))
            middle = gate * sigmoid * up
            out[row] = weight * middle @ w_down[expert]
            d_row_weights[row] = middle @ w_down[expert] @ d_out[row]
            d_middle = weight * w_down[expert] @ d_out[row]
            d_gate = d_middle * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
            d_hidden = np.concatenate([d_gate, d_middle * gate * sigmoid])
            d_down[expert] += np.outer(weight * middle, d_out[row])
            d_gate_up[expert] += np.outer(rows[row], d_hidden)
            d_rows[row] = w_gate_up[expert] @ d_hidden
    return out, d_rows, d_gate_up, d_down, d_row_weights


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(("layout", "batched"), [("ragged", False), ("capacity", False), ("capacity", True)])
@pytest.mark.parametrize(("launch", "width", "hidden"), [(EVEN, 32, 16), (UNEVEN, 40, 24)], ids=["even", "uneven"])
def test_values_and_gradients(ops, layout, batched, weighted, launch, width, hidden):
    groups, owned, *given, d_out = problem(layout, width, hidden)
    row_weights = np.where(owned, np.random.default_rng(1).integers(0, 3, len(owned)), np.nan).astype(np.float32)
    methods = Methods(batched=batched, rows=launch, weights=launch)

    def layer(rows, w_gate_up, w_down, row_weights):
        weights = row_weights if weighted else None
        return ops.grouped_mlp.grouped_mlp(rows, w_gate_up, w_down, groups, weights, methods)

    out, pull = jax.vjp(layer, *map(jnp.asarray, (*given, row_weights)))
    found = out, *pull(jnp.asarray(d_out))
    wanted = by_hand(groups, *given, row_weights if weighted else np.ones(len(owned)), d_out)
    names = "out", "d_rows", "d_gate_up", "d_down", *(["d_row_weights"] if weighted else [])
    for name, got, right in zip(names, found, wanted, strict=False):
        got = np.asarray(got)
        if got.shape[0] == len(owned):
            assert np.isnan(got[~owned]).all(), f"{name}: rows that nobody owns were written"
            np.testing.assert_allclose(got[owned], right[owned], rtol=0, atol=3e-4, err_msg=name)
        else:
            for expert in range(len(SIZES)):
                scale = max(np.abs(right[expert]).max(), 1)
                np.testing.assert_allclose(
                    got[expert], right[expert], rtol=0, atol=2e-5 * scale, err_msg=f"{name} of expert {expert}"
                )


@pytest.mark.parametrize(("padding_rows", "batched"), [(-10, True), (80, True), (100, False)])
def test_capacity_rows_are_multiplied_by_what_padding_makes_faster(ops, monkeypatch, padding_rows, batched):
    groups, owned, rows, w_gate_up, w_down, d_out = problem("capacity", 32, 16)
    product = Mock(wraps=ops.grouped_matmul.product)
    monkeypatch.setattr(ops.grouped_matmul, "product", product)
    arguments = (jnp.asarray(rows).reshape(len(SIZES), -1, 32), *map(jnp.asarray, (w_gate_up, w_down)))
    expected_rows = max(SIZES) - padding_rows
    row_weights = np.where(owned, np.random.default_rng(1).integers(0, 3, len(owned)), np.nan).astype(np.float32)

    def layer(rows, w_gate_up, w_down, row_weights):
        return ops.grouped_mlp.capacity_mlp(rows, w_gate_up, w_down, groups.sizes_e, expected_rows, row_weights)

    out, pull = jax.vjp(layer, *arguments, jnp.asarray(row_weights).reshape(len(SIZES), -1))
    found = out, *pull(jnp.asarray(d_out).reshape(out.shape))
    assert product.call_count == (0 if batched else 4)
    wanted = by_hand(groups, rows, w_gate_up, w_down, row_weights, d_out)
    for n in (0, 1, 4):  # out, of rows, of their weights: at rows
        got = np.asarray(found[n]).reshape(len(owned), *wanted[n].shape[1:])
        np.testing.assert_allclose(got[owned], wanted[n][owned], rtol=0, atol=3e-4)
    for n in (2, 3):
        np.testing.assert_allclose(found[n], wanted[n], rtol=0, atol=2e-5 * np.abs(wanted[n]).max())


def test_rows_that_hopper_kernels_refuse_are_said_once(ops, monkeypatch, caplog):
    """Products and weight gradients by the slower kernels: a line for each shape, why."""
    call.log_once.cache_clear()
    monkeypatch.setattr(call, "triton_call", lambda *_, out_shape, **__: jax.tree.map(jnp.ones_like, out_shape))
    rows, w_gate_up, w_down = jnp.ones((12, 512)), jnp.ones((2, 512, 1024)), jnp.ones((2, 512, 512))
    bf16 = [array.astype(jnp.bfloat16) for array in (rows, w_gate_up, w_down)]
    groups = ragged_groups(jnp.array([5, 6], jnp.int32))
    for _ in range(2):
        out, pull = jax.vjp(lambda *arrays: ops.grouped_mlp.grouped_mlp(*arrays, groups), *bf16)
        pull(out)
    lines = sorted(record.getMessage() for record in caplog.records)
    starts = ["gradients of weights by Triton's kernel: (12, "] * 2 + ["products of rows by Triton's kernel: (12, "] * 3
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)
        assert line.endswith(": 12 rows must be a multiple of 8")


def test_a_remat_policy_can_keep_the_first_product_by_its_name(ops, monkeypatch):
    """Of five products of rows the backward pass repeats one: the first."""

    def launch(array, *_, out_shape, **__):
        """Something of the right shape that depends on the first array."""
        return jax.tree.map(lambda out: jnp.full_like(out, array[0, 0]), out_shape)

    monkeypatch.setattr(call, "triton_call", launch)
    rows, w_gate_up, w_down = jnp.ones((2, 8, 16)), jnp.ones((2, 16, 16)), jnp.ones((2, 8, 16))

    def products(policy):
        layer = jax.checkpoint(
            lambda x: ops.grouped_mlp.capacity_mlp(x, w_gate_up, w_down, jnp.array([8, 7]), 8), policy=policy
        )
        return str(jax.make_jaxpr(lambda x: jax.vjp(layer, x)[1](x))(rows)).count("dot_general")

    assert products(jax.checkpoint_policies.save_only_these_names("expert_hidden")) == 4
    assert products(jax.checkpoint_policies.nothing_saveable) == 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_nobody_owns_are_not_written(ops, layout):
    """Also where everything that a program may read is finite: a row too many would show."""
    groups, owned, *_ = problem(layout, 40, 24)
    hidden, weights = jnp.ones((len(owned), 48)), jnp.ones(len(owned))
    written = (
        ops.swiglu.swiglu(hidden, groups, launch=swiglu_op.Launch(rows=16, columns=16)),
        *ops.swiglu.swiglu_gradient(hidden, hidden[:, :24], groups, weights, swiglu_op.Launch(rows=4, columns=32)),
    )
    for array in written:
        unowned = ~owned.reshape(-1, *[1] * (array.ndim - 1))
        np.testing.assert_array_equal(np.isnan(array), np.broadcast_to(unowned, array.shape))


def test_saturated_gates_stay_finite(ops):
    """exp(-gate) overflows float32 below -88, of which NumPy warns and a GPU does not."""
    groups = ragged_groups(jnp.array([2], jnp.int32))
    hidden = jnp.concatenate([jnp.array([[800.0] * 8, [-800.0] * 8]), jnp.array([[8.0] * 8, [-8.0] * 8])], axis=1)
    with np.errstate(over="ignore"):
        middle = ops.swiglu.swiglu(hidden, groups)
        d_hidden, none = ops.swiglu.swiglu_gradient(hidden, hidden[:, 8:], groups)
    assert none is None
    np.testing.assert_allclose(middle, [[6400.0] * 8, [0.0] * 8])
    np.testing.assert_allclose(d_hidden, [[64.0] * 8 + [6400.0] * 8, [0.0] * 16])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plain_reference_agrees(layout):
    groups, owned, *given, d_out = problem(layout, 40, 24)
    row_weights = np.where(owned, 0.5, np.nan).astype(np.float32)
    out = reference.grouped_mlp(*map(jnp.asarray, given), groups, jnp.asarray(row_weights))
    right, *_ = by_hand(groups, *given, row_weights, d_out)
    np.testing.assert_allclose(np.asarray(out)[owned], right[owned], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(out)[~owned], 0)
    hidden, d_middle = (jnp.asarray(np.random.default_rng(2).standard_normal((5, n)), jnp.float32) for n in (48, 24))
    weights = jnp.arange(5.0)
    _, pull = jax.vjp(swiglu_reference.swiglu, hidden, weights)
    for found, wanted in zip(swiglu_reference.swiglu_gradient(hidden, d_middle, weights), pull(d_middle), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
