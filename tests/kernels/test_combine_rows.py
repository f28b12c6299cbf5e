"""combine_rows and its gradients under Triton's interpreter against NumPy in float64: odd sizes, drops, poison."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels.combine_rows import reference
from ep_jax_kernels.combine_rows.op import BACKWARD_CANDIDATES, FORWARD_CANDIDATES, Launch


def problem(tokens, choices, num_rows, width, dtype=np.float32, seed=0):
    """A random injection of some assignments into rows; what is not held is NaN: rows, weights."""
    rng = np.random.default_rng(seed)
    assignment = np.full(num_rows, -1, np.int32)
    held = rng.permutation(tokens * choices)[: min(2 * tokens * choices // 3, num_rows - 3)]
    assignment[rng.permutation(num_rows)[: len(held)]] = held
    place = np.full(tokens * choices, -1, np.int32)
    place[assignment[assignment >= 0]] = np.flatnonzero(assignment >= 0)
    place = place.reshape(tokens, choices)
    rows = rng.standard_normal((num_rows, width)).astype(dtype)
    rows[assignment < 0] = np.nan
    weights = rng.random((tokens, choices)).astype(np.float32)
    weights[place < 0] = np.nan
    return rows, weights, place, assignment, rng.standard_normal((tokens, width)).astype(dtype)


def combined(rows, weights, place, d_out):
    """(out, d_rows, d_weights) assignment by assignment in float64."""
    out, d_rows, d_weights = np.zeros(d_out.shape), np.zeros(rows.shape), np.zeros(weights.shape)
    for t, k in np.ndindex(place.shape):
        if (q := place[t, k]) >= 0:
            row, gradient = rows[q].astype(np.float64), d_out[t].astype(np.float64)
            out[t] += weights[t, k] * row
            d_rows[q] = weights[t, k] * gradient
            d_weights[t, k] = row @ gradient
    return out, d_rows, d_weights


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("tokens", "choices", "num_rows", "width"), [(7, 1, 12, 8), (13, 3, 31, 40), (5, 8, 70, 136)])
def test_values_and_gradients(ops, dtype, tokens, choices, num_rows, width):
    rows, weights, place, assignment, d_out = problem(tokens, choices, num_rows, width, dtype)

    def run(combine_rows):
        out, pull = jax.vjp(
            lambda rows, weights: combine_rows(rows, weights, jnp.asarray(place), jnp.asarray(assignment), dtype),
            *map(jnp.asarray, (rows, weights)),
        )
        return out, *pull(jnp.asarray(d_out))

    found, plain = run(ops.combine_rows.combine_rows), run(reference.combine_rows)
    wanted = combined(rows, weights, place, d_out)
    for name, got, other, right in zip(("out", "d_rows", "d_weights"), found, plain, wanted, strict=True):
        # float16: half a unit in the last place of one rounding; what is summed in float32 is not rounded again.
        tolerance = 1e-3 if dtype == np.float16 and name != "d_weights" else 1e-5
        for array in (got, other):
            np.testing.assert_allclose(array, right, rtol=tolerance, atol=tolerance, err_msg=name)
    for gradients in (found, plain):
        assert [array.dtype for array in gradients] == [dtype, dtype, jnp.float32]


def test_bfloat16_rows_are_widened_before_they_are_multiplied(ops):
    rows, weights, place, assignment, d_out = problem(6, 4, 20, 24)
    rows_bf16, d_out_bf16 = jnp.asarray(rows, jnp.bfloat16), jnp.asarray(d_out, jnp.bfloat16)
    out = ops.combine_rows.weighted_sum(rows_bf16, jnp.asarray(weights), jnp.asarray(place), jnp.float32)
    _, d_weights = ops.combine_rows.combine_rows_gradient(
        d_out_bf16, rows_bf16, *map(jnp.asarray, (weights, place, assignment))
    )
    exact = [np.asarray(array.astype(jnp.float32)) for array in (rows_bf16, d_out_bf16)]
    right, _, right_weights = combined(exact[0], weights, place, exact[1])
    np.testing.assert_allclose(out, right, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(d_weights, right_weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("launch", FORWARD_CANDIDATES, ids=str)
def test_every_forward_candidate(ops, launch):
    rows, weights, place, _, d_out = problem(11, 2, 17, 1032)
    out = ops.combine_rows.weighted_sum(*map(jnp.asarray, (rows, weights, place)), jnp.float32, launch)
    np.testing.assert_allclose(out, combined(rows, weights, place, d_out)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("launch", BACKWARD_CANDIDATES, ids=str)
def test_every_backward_candidate(ops, launch):
    rows, weights, place, assignment, d_out = problem(11, 2, 37, 1032)
    found = ops.combine_rows.combine_rows_gradient(*map(jnp.asarray, (d_out, rows, weights, place, assignment)), launch)
    for got, right in zip(found, combined(rows, weights, place, d_out)[1:], strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)


def test_sum_runs_over_choices_in_ascending_order(ops):
    """1e8 - 1e8 + 1 is 1 in this order only."""
    rows = np.repeat(np.float32([[1.0], [-1e8], [1e8]]), 8, axis=1)
    place, weights = np.int32([[2, 1, 0]]), np.ones((1, 3), np.float32)
    out = ops.combine_rows.weighted_sum(*map(jnp.asarray, (rows, weights, place)), jnp.float32, Launch(tokens=1))
    np.testing.assert_array_equal(out, np.ones((1, 8), np.float32))
