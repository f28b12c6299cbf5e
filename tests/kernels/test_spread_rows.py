"""spread_rows under Triton's interpreter against NumPy: every bit, rows of no place, empty output rows, odd sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels.call import RowLaunch
from ep_jax_kernels.spread_rows.op import CANDIDATES

SMALL = RowLaunch(rows=4, columns=32, warps=1)


def problem(num_rows, num_out, choices, width, seed=0):
    """(rows, NaN where no place takes one; the row of each output row or -1; its inverse; the output wanted)."""
    rng = np.random.default_rng(seed)
    source = np.full(num_out, -1, np.int32)
    places = np.full((num_rows, choices), -1, np.int32)
    free = list(rng.permutation(num_out))
    for n in range(num_rows):
        for j in np.flatnonzero(rng.random(choices) < 0.7) if n % 5 else ():  # every fifth row goes nowhere
            if len(free) > num_out // 8:
                places[n, j] = free.pop()
                source[places[n, j]] = n
    rows = rng.standard_normal((num_rows, width)).astype(np.float32)
    rows[(places < 0).all(axis=1)] = np.nan
    wanted = np.zeros((num_out, width), np.float32)
    for m, n in enumerate(source):
        if n >= 0:
            wanted[m] = rows[n]
    return rows, source, places, wanted


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
@pytest.mark.parametrize(
    ("num_rows", "num_out", "choices", "width"), [(5, 17, 3, 8), (16, 80, 8, 72), (3, 5, 2, 32), (41, 130, 1, 136)]
)
def test_every_bit_of_every_row(ops, dtype, num_rows, num_out, choices, width):
    rows, source, places, wanted = problem(num_rows, num_out, choices, width)
    rows, wanted = jnp.asarray(rows).astype(dtype), jnp.asarray(wanted).astype(dtype)
    got = ops.spread_rows.spread_rows(rows, jnp.asarray(source), jnp.asarray(places), SMALL)
    assert got.dtype == rows.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


@pytest.mark.parametrize("launch", CANDIDATES, ids=str)
def test_every_candidate(ops, launch):
    rows, source, places, wanted = problem(7, 150, 9, 1032)
    given = (jnp.asarray(array) for array in (rows, source, places))
    np.testing.assert_array_equal(ops.spread_rows.spread_rows(*given, launch), wanted)


def test_places_beyond_the_output_receive_nothing(ops):
    rows = jnp.ones((2, 8), jnp.float32)
    source, places = jnp.array([0, -1, 5], jnp.int32), jnp.array([[0, 3], [-1, 70]], jnp.int32)
    got = ops.spread_rows.spread_rows(rows, source, places, SMALL)
    np.testing.assert_array_equal(np.asarray(got)[:, 0], [1, 0, 0])


@pytest.mark.parametrize(("choices", "num_out", "spread"), [(3, 40, True), (1, 40, False), (3, 9, False)])
def test_rows_of_several_places_are_spread_and_others_gathered(ops, monkeypatch, choices, num_out, spread):
    """Forward for `move_rows`, in the derivative for `sum_moved_rows`; the same either way."""
    rows, source, places, wanted = problem(10, num_out, choices, 24)
    ran = []
    operator = ops.gather_rows
    for name in ("gather_rows", "spread_rows"):
        kernel = getattr(operator, name)
        monkeypatch.setattr(operator, name, lambda *given, name=name, kernel=kernel: ran.append(name) or kernel(*given))
    source, places = jnp.asarray(source), jnp.asarray(places)
    np.testing.assert_array_equal(operator.move_rows(jnp.asarray(rows), source, places), wanted)
    _, pull = jax.vjp(lambda x: operator.sum_moved_rows(x, places, source), jnp.ones((num_out, 24), jnp.float32))
    np.testing.assert_array_equal(pull(jnp.asarray(rows))[0], wanted)
    assert ran == ["spread_rows" if spread else "gather_rows"] * 2


def test_a_row_of_odd_width_is_refused(ops):
    with pytest.raises(NotImplementedError, match="rows of 12 x bfloat16"):
        ops.spread_rows.spread_rows(
            jnp.zeros((2, 12), jnp.bfloat16), jnp.zeros(4, jnp.int32), jnp.zeros((2, 2), jnp.int32)
        )
