"""gather_rows and move_rows under Triton's interpreter against NumPy: every bit, no row, odd sizes, poison."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels.call import RowLaunch
from ep_jax_kernels.gather_rows import reference
from ep_jax_kernels.gather_rows.op import CANDIDATES

SMALL = RowLaunch(rows=4, columns=32, warps=1)


def problem(dtype, num_rows, num_out, width, seed=0):
    """Random bits (NaN patterns among them) and indices with repeats, -1, and ones that are out of range."""
    rng = np.random.default_rng(seed)
    unsigned = np.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    rows = rng.integers(0, np.iinfo(unsigned).max, (num_rows, width), unsigned)
    index = rng.integers(-1, num_rows, num_out).astype(np.int32)
    index[0], index[-1] = -1, num_rows - 1
    index[1 : 1 + num_out // 8] = num_rows + 5
    return rows, index


def gathered(rows, index):
    """Row by row."""
    out = np.zeros((len(index), rows.shape[1]), rows.dtype)
    for m, source in enumerate(index):
        if 0 <= source < len(rows):
            out[m] = rows[source]
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
@pytest.mark.parametrize(("num_rows", "num_out", "width"), [(5, 17, 8), (16, 12, 72), (3, 1, 32), (40, 33, 136)])
def test_every_bit_of_every_row(ops, dtype, num_rows, num_out, width):
    bits, index = problem(dtype, num_rows, num_out, width)
    rows = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.dtype(dtype))
    got = ops.gather_rows.gather_rows(rows, jnp.asarray(index), SMALL)
    assert got.dtype == rows.dtype
    np.testing.assert_array_equal(np.asarray(got).view(bits.dtype), gathered(bits, index))
    plain = reference.gather_rows(rows, jnp.where(index < num_rows, index, -1))
    np.testing.assert_array_equal(np.asarray(plain).view(bits.dtype), gathered(bits, index))


@pytest.mark.parametrize("launch", CANDIDATES, ids=str)
def test_every_candidate(ops, launch):
    rows, index = problem(jnp.float32, 6, 19, 1032)
    got = ops.gather_rows.gather_rows(jnp.asarray(rows.view(np.int32)), jnp.asarray(index), launch)
    np.testing.assert_array_equal(np.asarray(got).view(rows.dtype), gathered(rows, index))


@pytest.mark.parametrize("repeats", [1, 3])
def test_gradient_sums_over_places_and_reads_no_unused_row(ops, repeats):
    rng = np.random.default_rng(1)
    num_rows, width = 9, 24
    source = rng.permutation(np.r_[np.repeat(np.arange(num_rows - 2), repeats), np.full(5, -1)]).astype(np.int32)
    places = np.full((num_rows, repeats), -1, np.int32)
    for n in range(num_rows - 2):
        places[n] = np.flatnonzero(source == n)
    rows = rng.standard_normal((num_rows, width)).astype(np.float32)
    rows[num_rows - 2 :] = np.nan  # no output row takes them
    gradient = rng.standard_normal((len(source), width)).astype(np.float32)
    gradient[source < 0] = np.nan
    wanted = np.zeros((num_rows, width))
    for m, n in enumerate(source):
        if n >= 0:
            wanted[n] += gradient[m].astype(np.float64)
    for move_rows in (ops.gather_rows.move_rows, reference.move_rows):
        out, pull = jax.vjp(
            lambda x, move=move_rows: move(x, jnp.asarray(source), jnp.asarray(places)), jnp.asarray(rows)
        )
        np.testing.assert_array_equal(out, gathered(rows, source))
        np.testing.assert_allclose(pull(jnp.asarray(gradient))[0], wanted, rtol=1e-6, atol=1e-6)


def test_sums_of_moved_rows_are_the_adjoint(ops):
    """Each row goes to one output row or none; neither rows nor gradients of the latter are looked at."""
    rng = np.random.default_rng(2)
    num_rows, num_out, choices, width = 11, 6, 3, 24
    source = np.full(num_rows, -1, np.int32)
    places = np.full((num_out, choices), -1, np.int32)
    for n in range(num_rows - 3):
        m = n % (num_out - 1)  # the last output row takes nothing
        source[n] = m
        places[m, np.flatnonzero(places[m] < 0)[0]] = n
    rows = rng.standard_normal((num_rows, width)).astype(np.float32)
    rows[source < 0] = np.nan
    gradient = rng.standard_normal((num_out, width)).astype(np.float32)
    gradient[-1] = np.nan
    wanted = np.zeros((num_out, width))
    for n, m in enumerate(source):
        if m >= 0:
            wanted[m] += rows[n].astype(np.float64)
    for sum_rows in (ops.gather_rows.sum_moved_rows, reference.sum_moved_rows):
        out, pull = jax.vjp(lambda x, add=sum_rows: add(x, jnp.asarray(places), jnp.asarray(source)), jnp.asarray(rows))
        np.testing.assert_allclose(out, wanted, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(pull(jnp.asarray(gradient))[0], gathered(gradient, source))


@pytest.mark.parametrize(("width", "dtype"), [(12, "bfloat16"), (16, "int8")])
def test_other_rows_are_refused(ops, width, dtype):
    with pytest.raises(NotImplementedError, match="multiples of 8"):
        ops.gather_rows.gather_rows(jnp.zeros((4, width), dtype), jnp.zeros(3, jnp.int32))
