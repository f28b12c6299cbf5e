"""The stock recipe computes the layer: values and all four gradients against NumPy loops in float64.

Letters: S ep shards, T tokens of a shard, K choices, E experts, e local experts, H row width, F expert hidden width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from tools.bench.stock import receive_rows, stock_layer

S, T, K, E, H, F = 4, 6, 2, 8, 6, 5


def expected(rows_TH, ids_TK, weights_TK, w_in_EH2F, w_out_EFH, d_out_TH):
    """(out, gradients of rows, weights, w_in, w_out) of sum(out * d_out), one assignment at a time."""
    rows_TH, weights_TK, w_in_EH2F, w_out_EFH, d_out_TH = (
        np.asarray(x, np.float64) for x in (rows_TH, weights_TK, w_in_EH2F, w_out_EFH, d_out_TH)
    )
    out, d_rows, d_weights = np.zeros_like(rows_TH), np.zeros_like(rows_TH), np.zeros_like(weights_TK)
    d_in, d_last = np.zeros_like(w_in_EH2F), np.zeros_like(w_out_EFH)
    for token, choice in np.ndindex(ids_TK.shape):
        expert, x, weight = ids_TK[token, choice], rows_TH[token], weights_TK[token, choice]
        gate, up = np.split(x @ w_in_EH2F[expert], 2)
        sigmoid = 1 / (1 + np.exp(-gate))
        hidden = gate * sigmoid * up
        result = hidden @ w_out_EFH[expert]
        out[token] += weight * result
        d_weights[token, choice] = d_out_TH[token] @ result
        d_result = weight * d_out_TH[token]
        d_last[expert] += np.outer(hidden, d_result)
        d_hidden = w_out_EFH[expert] @ d_result
        d_gate = d_hidden * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_both = np.concatenate([d_gate, d_hidden * gate * sigmoid])
        d_in[expert] += np.outer(x, d_both)
        d_rows[token] += w_in_EH2F[expert] @ d_both
    return out, d_rows, d_weights, d_in, d_last


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((S,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:S])


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    # Expert 3 gets nothing, and shard 3 (experts 6 and 7) a single assignment.
    ids_TK = np.stack([rng.choice([0, 1, 2, 4, 5], K, replace=False) for _ in range(S * T)]).astype(np.int32)
    ids_TK[2, 1] = 7
    sizes = ((S * T, H), (S * T, K), (E, H, 2 * F), (E, F, H), (S * T, H))
    rows, weights, w_in, w_out, d_out = (rng.standard_normal(size).astype(np.float32) for size in sizes)
    return rows, ids_TK, weights, w_in, w_out, d_out


def gradients_of(mesh, rows_N):
    split = PartitionSpec("ep")
    layer = jax.shard_map(stock_layer(rows_N), mesh=mesh, in_specs=(split,) * 5, out_specs=(split, split))

    def run(rows, ids, weights, w_in, w_out, d_out):
        def loss(rows, weights, w_in, w_out):
            out, fates = layer(rows, ids, weights, w_in, w_out)
            return jnp.sum(out * d_out), (out, fates)

        gradients, (out, fates) = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(rows, weights, w_in, w_out)
        return (out, *gradients), fates

    return jax.jit(run)


@pytest.mark.parametrize("spare_rows", [0, 5])
def test_values_and_gradients(mesh, inputs, spare_rows):
    found, fates = gradients_of(mesh, receive_rows(inputs[1], S, E) + spare_rows)(*inputs)
    assert (np.asarray(fates) == 0).all()
    for got, want in zip(found, expected(*inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_the_receive_buffer_is_what_the_most_loaded_device_gets(inputs):
    counts = [0] * S
    for expert in inputs[1].ravel():
        counts[expert // (E // S)] += 1
    assert receive_rows(inputs[1], S, E) == max(counts)


def test_on_a_gpu_it_is_the_collective_itself_with_one_update_per_peer(mesh, inputs):
    lowered = gradients_of(mesh, 30).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in lowered.splitlines() if "ragged_all_to_all" in line]
    assert len(calls) == 4  # there and back, forward and backward
    assert all(line.count(f"tensor<{S}xi32>") >= 4 for line in calls)
