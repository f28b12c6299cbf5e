"""Experts on grouped rows: blocks and ragged products against NumPy in float64, odd and empty groups, unused tails.

And what padding a transport expects, against its own plan.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.ep import EPConfig, blocks
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.experts import RaggedRows, swiglu_experts
from ep_jax.ep.pooled_wave import PooledWave
from ep_jax.ep.routes import Routes

H, F = 8, 4
SIZES = ([0, 1, 7, 63, 64, 65, 300], [500, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 512])
ROWS = 512


def problem(sizes, seed=0):
    rng = np.random.default_rng(seed)
    x, dy = rng.standard_normal((2, ROWS, H))
    weights = rng.uniform(0, 2, ROWS)
    x[sum(sizes) :], dy[sum(sizes) :], weights[sum(sizes) :] = np.nan, np.nan, np.nan  # nobody may look there
    return x, rng.standard_normal((7, H, 2 * F)), rng.standard_normal((7, F, H)), weights, dy


def reference(sizes, x, w_in, w_out, weights, dy):
    """Outputs and gradients, row by row in float64; zero past the last group."""
    y, dx, d_weights = np.zeros_like(x), np.zeros_like(x), np.zeros(len(x))
    d_in, d_out = np.zeros_like(w_in), np.zeros_like(w_out)
    row = 0
    for expert, size in enumerate(sizes):
        for _ in range(size):
            hidden = x[row] @ w_in[expert]
            gate, up = hidden[:F], hidden[F:]
            sigmoid = 1 / (1 + np.exp(-gate))
            middle = gate * sigmoid * up
            y[row] = weights[row] * (middle @ w_out[expert])
            d_weights[row] = dy[row] @ (middle @ w_out[expert])
            d_middle = weights[row] * (w_out[expert] @ dy[row])
            d_gate = d_middle * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
            d_hidden = np.concatenate([d_gate, d_middle * gate * sigmoid])
            d_out[expert] += weights[row] * np.outer(middle, dy[row])
            d_in[expert] += np.outer(x[row], d_hidden)
            dx[row] = w_in[expert] @ d_hidden
            row += 1
    return y, dx, d_in, d_out, d_weights


@pytest.fixture(scope="module", params=["blocks", "ragged", "blocks, weighted", "ragged, weighted"])
def compiled(request):
    """(whether weighted, jitted (x, w_in, w_out, weights, dy, sizes) -> outputs and gradients), either way."""
    weighted = "weighted" in request.param

    def run(x, w_in, w_out, weights, dy, sizes):
        def layer(x, w_in, w_out, weights):
            return swiglu_experts(RaggedRows(x, sizes, weights if weighted else None), w_in, w_out)

        y, pull = jax.vjp(layer, x, w_in, w_out, weights)
        return y, *pull(jnp.where(jnp.arange(ROWS)[:, None] < sizes.sum(), dy, 0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "worthwhile", lambda *_: "blocks" in request.param)
        arrays = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in problem(SIZES[0])]
        return weighted, jax.jit(run).lower(*arrays, jax.ShapeDtypeStruct((7,), jnp.int32)).compile()


@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients(compiled, sizes):
    (weighted, run), given = compiled, problem(sizes)
    found = run(*(jnp.asarray(a, jnp.float32) for a in given), jnp.array(sizes, jnp.int32))
    *arrays, weights, dy = given
    right = reference(sizes, *arrays, weights if weighted else np.ones(ROWS), dy)
    names = "y", "dx", "d_in", "d_out", *(["d_weights"] if weighted else [])
    for name, got, wanted in zip(names, found, right, strict=False):
        got = np.asarray(got)
        if name in ("d_in", "d_out"):  # of each expert on its own: one wrong expert must show
            for expert in range(7):
                np.testing.assert_allclose(got[expert], wanted[expert], atol=2e-5 * np.abs(wanted).max(), rtol=1e-4)
        else:
            np.testing.assert_allclose(got, np.nan_to_num(wanted), atol=2e-5 * max(np.abs(wanted).max(), 1))


def test_every_row_has_one_place_and_blocks_one_expert():
    rng = np.random.default_rng(1)
    for sizes in [*SIZES, *rng.multinomial(500, rng.dirichlet(np.ones(7)), 5).tolist()]:
        plan = jax.tree.map(np.asarray, blocks.plan_blocks(jnp.array(sizes, jnp.int32), ROWS))
        used = plan.row_bB[plan.row_bB >= 0]
        assert sorted(used.tolist()) == list(range(sum(sizes)))
        for row in used.tolist():
            assert plan.row_bB.ravel()[plan.place_N[row]] == row
        assert (plan.place_N[sum(sizes) :] == -1).all()
        expert_of_row = np.repeat(np.arange(7), sizes)
        for block, experts in zip(plan.row_bB, plan.expert_be, strict=True):
            held = block[block >= 0]
            assert experts.sum() == (len(held) > 0)
            assert set(expert_of_row[held]) <= set(np.flatnonzero(experts))


def test_large_experts_are_left_to_ragged_products():
    assert blocks.worthwhile(65_536, 96, 192, 384)
    assert not blocks.worthwhile(65_536, 16, 3072, 6144)
    assert not blocks.worthwhile(65_536, 1, 192, 384)


@pytest.mark.parametrize(
    ("factors", "padding"),
    [
        (dict(sender_factor=1.1, receiver_factor=1.25), 0.2),
        (dict(sender_factor=1.1, receiver_factor=1.25, waves=4), 0.2),
        (dict(sender_factor=0.75, receiver_factor=1.0), 0.25),  # the senders drop a quarter
    ],
    ids=str,
)
def test_padding_is_known_beforehand(factors, padding):
    """Where every expert is chosen equally often, in each wave too, as many rows are filled as were expected."""
    shards, experts, choices, tokens = 4, 8, 1, 256
    shape = LayerShape(shards, experts, choices, tokens)
    transport = PooledWave(EPConfig(order="sequence", **factors), shape)
    token_T1 = np.arange(tokens)[:, None]  # to the shards in turn, and there to an expert four times, then to the other
    ids_TK = token_T1 % shards * (experts // shards) + token_T1 // (4 * shards) % (experts // shards)
    total = jnp.int32(shards * tokens)
    routes = Routes(jnp.asarray(ids_TK, jnp.int32), jnp.ones((tokens, choices)), jnp.ones(tokens, bool), total, 16)
    plan = transport.plan(routes)  # of every shard: all send the same
    local_id_WSP = plan.local_id_Q.reshape(transport.waves, shards, transport.pool_rows)
    for wave in range(transport.waves):
        came_SP = jnp.stack([local_id_WSP[wave, 0]] * shards)
        sizes_e = transport.accept(came_SP, plan.expert_limit).sizes_e
        np.testing.assert_array_equal(sizes_e, transport.balanced_rows)
    assert transport.balanced_rows / transport.expert_rows == 1 - padding
