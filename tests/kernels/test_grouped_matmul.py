"""Grouped products in Triton's interpreter against NumPy in float64: each expert on its own, unused rows poisoned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels.grouped_matmul import reference
from ep_jax_kernels.grouped_matmul.op import Launch
from ep_jax_kernels.grouped_matmul.tiles import capacity_groups, num_tiles, plan_tiles, ragged_groups

SIZES = [0, 1, 7, 63, 64, 65, 300]
RAGGED = (SIZES, [500, 0, 0, 0, 0, 0, 0], [0] * 7, [0, 0, 0, 0, 0, 0, 512], [3, 509, 0, 0, 0, 0, 0])
CAPACITY_ROWS = 300  # of each expert, the largest of SIZES
EVEN = Launch(block_m=64, block_n=32, block_k=16, group=4, warps=4)
UNEVEN = Launch(block_m=32, block_n=64, block_k=32, group=3, warps=4)  # no block divides the widths below
K, N = 48, 32
ODD_K, ODD_N = 40, 56


def problem(starts, sizes, num_rows, k, n, dtype=np.float32, seed=0):
    """Rows, weights and output gradients; NaN in rows that nobody owns."""
    rng = np.random.default_rng(seed)
    owned = np.zeros(num_rows, bool)
    for start, size in zip(starts, sizes, strict=True):
        owned[start : start + size] = True
    rows, d_out = (rng.standard_normal((num_rows, width)).astype(dtype) for width in (k, n))
    rows[~owned], d_out[~owned] = np.nan, np.nan
    return rows, rng.standard_normal((len(sizes), k, n)).astype(dtype), d_out, owned


def multiplied(starts, sizes, rows, weights, d_out):
    """(out, d_rows, d_weights), row by row in float64; NaN in rows that nobody owns."""
    out, d_rows, d_weights = np.full(d_out.shape, np.nan), np.full(rows.shape, np.nan), np.zeros(weights.shape)
    rows, weights, d_out = (array.astype(np.float64) for array in (rows, weights, d_out))
    for expert, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        for row in range(start, start + size):
            out[row] = rows[row] @ weights[expert]
            d_rows[row] = weights[expert] @ d_out[row]
            d_weights[expert] += np.outer(rows[row], d_out[row])
    return out, d_rows, d_weights


def check(found, wanted, owned, tolerance=2e-5):
    for name, got, right in zip(("out", "d_rows", "d_weights"), found, wanted, strict=True):
        got = np.asarray(got, np.float64)
        if name == "d_weights":  # of each expert on its own: one wrong expert must show, and all of it is written
            for expert, (one, right_one) in enumerate(zip(got, right, strict=True)):
                scale = max(np.abs(right_one).max(), 1)
                np.testing.assert_allclose(one, right_one, rtol=0, atol=tolerance * scale, err_msg=f"expert {expert}")
        else:
            assert np.isnan(got[~owned]).all(), f"{name}: rows that nobody owns were written"
            np.testing.assert_allclose(got[owned], right[owned], rtol=0, atol=tolerance * 30, err_msg=name)


def products(ops, groups, launch, rows, weights, d_out):
    """(product, gradient of the rows, gradient of the weights)."""
    op, (rows, weights, d_out) = ops.grouped_matmul, map(jnp.asarray, (rows, weights, d_out))
    return (
        op.product(rows, weights, groups, launch=launch),
        op.product(d_out, weights, groups, transposed=True, launch=launch),
        op.weight_product(rows, d_out, groups, weights.dtype, launch),
    )


@pytest.mark.parametrize(("launch", "k", "n"), [(EVEN, K, N), (UNEVEN, ODD_K, ODD_N)], ids=["even", "uneven"])
@pytest.mark.parametrize("sizes", RAGGED, ids=str)
def test_ragged_rows(ops, sizes, launch, k, n):
    groups = ragged_groups(jnp.array(sizes, jnp.int32))
    starts = np.cumsum(sizes) - sizes
    *given, owned = problem(starts, sizes, 512, k, n)
    check(products(ops, groups, launch, *given), multiplied(starts, sizes, *given), owned)


@pytest.mark.parametrize(("launch", "k", "n"), [(EVEN, K, N), (UNEVEN, ODD_K, ODD_N)], ids=["even", "uneven"])
def test_capacity_rows_skip_unwritten_tails(ops, launch, k, n):
    groups = capacity_groups(jnp.array(SIZES, jnp.int32), CAPACITY_ROWS)
    starts = np.arange(len(SIZES)) * CAPACITY_ROWS
    *given, owned = problem(starts, SIZES, len(SIZES) * CAPACITY_ROWS, k, n)
    check(products(ops, groups, launch, *given), multiplied(starts, SIZES, *given), owned)


def test_half_precision_sums_in_float32(ops):
    groups = ragged_groups(jnp.array([200, 57], jnp.int32))
    *given, owned = problem([0, 200], [200, 57], 260, K, N, np.float16)
    found = products(ops, groups, EVEN, *given)
    assert {str(array.dtype) for array in found} == {"float16"}
    check(found, multiplied([0, 200], [200, 57], *given), owned, tolerance=1e-3)
    wide = ops.grouped_matmul.weight_product(
        *(jnp.asarray(given[index]) for index in (0, 2)), groups, jnp.float32, EVEN
    )
    right = multiplied([0, 200], [200, 57], *given)[2]
    np.testing.assert_allclose(wide, right, rtol=0, atol=2e-5 * np.abs(right).max())


@pytest.mark.parametrize("sizes", RAGGED, ids=str)
def test_the_plain_reference_agrees(sizes):
    groups = ragged_groups(jnp.array(sizes, jnp.int32))
    starts = np.cumsum(sizes) - sizes
    rows, weights, d_out, owned = problem(starts, sizes, 512, ODD_K, ODD_N)
    out = reference.grouped_matmul(jnp.asarray(rows), jnp.asarray(weights), groups)
    d_rows = reference.grouped_matmul(jnp.asarray(d_out), jnp.asarray(weights.swapaxes(1, 2)), groups)
    d_weights = reference.grouped_weight_gradient(jnp.asarray(rows), jnp.asarray(d_out), groups, jnp.float32)
    for array in (out, d_rows):
        np.testing.assert_array_equal(np.asarray(array)[~owned], 0)
    found = (jnp.where(owned[:, None], out, jnp.nan), jnp.where(owned[:, None], d_rows, jnp.nan), d_weights)
    check(found, multiplied(starts, sizes, rows, weights, d_out), owned)


@pytest.mark.parametrize("block", [16, 64, 128])
def test_tiles_cover_every_owned_row_once(block):
    rng = np.random.default_rng(0)
    plan = jax.jit(plan_tiles, static_argnums=(1, 2))
    for sizes in [*RAGGED, *rng.multinomial(512, rng.dirichlet(np.full(7, 0.3)), 10).tolist()]:
        for groups, num_rows in (
            (ragged_groups(jnp.array(sizes, jnp.int32)), 512),
            (capacity_groups(jnp.array(sizes, jnp.int32), 512), 7 * 512),
        ):
            tiles = np.asarray(plan(groups, num_rows, block))
            assert tiles.shape == (num_tiles(num_rows, 7, block), 3)
            assert (tiles[:, 2] <= block).all()
            used = tiles[tiles[:, 2] > 0]
            assert (np.diff(used[:, 0]) >= 0).all()
            found = [(expert, first + i) for expert, first, rows in used for i in range(rows)]
            starts = np.asarray(groups.starts_e)
            assert found == [(expert, starts[expert] + i) for expert, size in enumerate(sizes) for i in range(size)]


def test_the_bound_on_tiles_is_reached():
    sizes = [1, 1, 1, 65, 129]
    assert num_tiles(sum(sizes), 5, 64) == sum(-(-size // 64) for size in sizes) == 8


@pytest.mark.parametrize(
    ("rows", "weights"), [(("bfloat16", 16), ("float32", 16)), (("int8", 16), ("int8", 16)), (("float32", 12),) * 2]
)
def test_what_the_kernels_cannot_do_is_refused(ops, rows, weights):
    groups = ragged_groups(jnp.array([4, 4], jnp.int32))
    (row_type, k), (weight_type, n) = rows, weights
    with pytest.raises(NotImplementedError, match="must be"):
        ops.grouped_matmul.product(jnp.zeros((8, k), row_type), jnp.zeros((2, k, n), weight_type), groups)
