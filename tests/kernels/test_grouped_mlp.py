"""SwiGLU experts in Triton's interpreter against NumPy in float64: each expert on its own, unused rows poisoned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels.grouped_matmul.op import Launch
from ep_jax_kernels.grouped_matmul.tiles import capacity_groups, ragged_groups
from ep_jax_kernels.grouped_mlp import reference
from ep_jax_kernels.grouped_mlp.op import Launches

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


def by_hand(groups, rows, w_gate_up, w_down, d_out):
    """(out, d_rows, d_gate_up, d_down), row by row in float64; NaN in rows that nobody owns."""
    rows, w_gate_up, w_down, d_out = (array.astype(np.float64) for array in (rows, w_gate_up, w_down, d_out))
    out, d_rows = np.full(rows.shape, np.nan), np.full(rows.shape, np.nan)
    d_gate_up, d_down = np.zeros(w_gate_up.shape), np.zeros(w_down.shape)
    for expert, (start, size) in enumerate(zip(*map(np.asarray, groups), strict=True)):
        for row in range(start, start + size):
            gate, up = np.split(rows[row] @ w_gate_up[expert], 2)
            sigmoid = 1 / (1 + np.exp(-gate))
            middle = gate * sigmoid * up
            out[row] = middle @ w_down[expert]
            d_middle = w_down[expert] @ d_out[row]
            d_gate = d_middle * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
            d_hidden = np.concatenate([d_gate, d_middle * gate * sigmoid])
            d_down[expert] += np.outer(middle, d_out[row])
            d_gate_up[expert] += np.outer(rows[row], d_hidden)
            d_rows[row] = w_gate_up[expert] @ d_hidden
    return out, d_rows, d_gate_up, d_down


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("launch", "width", "hidden"), [(EVEN, 32, 16), (UNEVEN, 40, 24)], ids=["even", "uneven"])
def test_values_and_gradients(ops, layout, launch, width, hidden):
    groups, owned, *given, d_out = problem(layout, width, hidden)
    launches = Launches(*(launch,) * 6)
    out, pull = jax.vjp(lambda *args: ops.grouped_mlp.grouped_mlp(*args, groups, launches), *map(jnp.asarray, given))
    found = out, *pull(jnp.asarray(d_out))
    for name, got, right in zip(
        ("out", "d_rows", "d_gate_up", "d_down"), found, by_hand(groups, *given, d_out), strict=True
    ):
        got = np.asarray(got)
        if name in ("out", "d_rows"):
            assert np.isnan(got[~owned]).all(), f"{name}: rows that nobody owns were written"
            np.testing.assert_allclose(got[owned], right[owned], rtol=0, atol=1e-4, err_msg=name)
        else:
            for expert in range(len(SIZES)):
                scale = max(np.abs(right[expert]).max(), 1)
                np.testing.assert_allclose(
                    got[expert], right[expert], rtol=0, atol=2e-5 * scale, err_msg=f"{name} of expert {expert}"
                )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_nobody_owns_are_not_written(ops, layout):
    """Also where everything that a program may read is finite: a row too many would show."""
    groups, owned, rows, w_gate_up, w_down, d_out = problem(layout, 40, 24)
    hidden = jnp.ones((len(rows), 48))
    written = (
        *ops.grouped_mlp.gate_up(*map(jnp.asarray, (rows, w_gate_up)), groups, UNEVEN),
        ops.grouped_mlp.gate_up_gradient(*map(jnp.asarray, (d_out, w_down)), hidden, groups, UNEVEN),
    )
    for array in written:
        np.testing.assert_array_equal(np.isnan(array), np.repeat(~owned[:, None], array.shape[1], axis=1))


def test_saturated_gates_stay_finite(ops):
    """exp(-gate) overflows float32 below -88, of which NumPy warns and a GPU does not."""
    groups = ragged_groups(jnp.array([2], jnp.int32))
    rows = jnp.array([[1.0] * 8, [-1.0] * 8])
    w_gate_up = jnp.concatenate([jnp.full((1, 8, 8), 100.0), jnp.ones((1, 8, 8))], axis=2)
    with np.errstate(over="ignore"):
        hidden, middle = ops.grouped_mlp.gate_up(rows, w_gate_up, groups, EVEN)
        d_hidden = ops.grouped_mlp.gate_up_gradient(rows, jnp.ones((1, 8, 8)), hidden, groups, EVEN)
    np.testing.assert_allclose(middle, [[6400.0] * 8, [0.0] * 8])
    np.testing.assert_allclose(d_hidden, [[64.0] * 8 + [6400.0] * 8, [0.0] * 16])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plain_reference_agrees(layout):
    groups, owned, rows, w_gate_up, w_down, d_out = problem(layout, 40, 24)
    out = reference.grouped_mlp(*map(jnp.asarray, (rows, w_gate_up, w_down)), groups)
    right, d_rows, *_ = by_hand(groups, rows, w_gate_up, w_down, d_out)
    np.testing.assert_allclose(np.asarray(out)[owned], right[owned], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(out)[~owned], 0)
    hidden, _ = reference.gate_up(*map(jnp.asarray, (rows, w_gate_up)), groups)
    d_hidden = reference.gate_up_gradient(*map(jnp.asarray, (d_out, w_down)), hidden, groups)
    found = reference.grouped_matmul(d_hidden, jnp.asarray(w_gate_up.swapaxes(1, 2)), groups)
    np.testing.assert_allclose(np.asarray(found)[owned], d_rows[owned], rtol=0, atol=1e-4)
