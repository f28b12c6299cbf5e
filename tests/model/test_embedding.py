"""The embedding's gradient against NumPy loops in float64: tokens that span blocks, rows that fill none, every type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.model.embedding import BLOCK_ROWS, look_up, sum_by_token

D = 5
CASES = {
    "few rows": lambda rng: rng.integers(0, 7, 11),
    "one row": lambda rng: np.array([3]),
    "one token": lambda rng: np.full(5 * BLOCK_ROWS, 2),
    "each token once": lambda rng: rng.permutation(3 * BLOCK_ROWS),
    "frequent and rare": lambda rng: rng.zipf(1.5, 7 * BLOCK_ROWS + 13) % 50,
    "edges of blocks": lambda rng: np.repeat(np.arange(8), [128, 128, 1, 127, 129, 255, 300, 60]),
    "two that alternate": lambda rng: np.arange(4 * BLOCK_ROWS) % 2,
}


def sums(rows_TD, tokens_T, vocab_size):
    out = np.zeros((vocab_size, rows_TD.shape[1]))
    for row, token in zip(rows_TD, tokens_T, strict=True):
        out[token] += np.asarray(row, np.float64)
    return out


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_summed_by_token(case, dtype):
    rng = np.random.default_rng(0)
    tokens = CASES[case](rng).astype(np.int32)
    vocab_size = int(tokens.max()) + 3
    rows = jnp.asarray(rng.normal(size=(len(tokens), D)), dtype)
    got = jax.jit(sum_by_token, static_argnums=2)(rows, tokens, vocab_size)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, sums(np.asarray(rows), tokens, vocab_size), rtol=1e-5, atol=1e-5)


def test_a_million_like_rows_are_counted_exactly():
    """What bfloat16 sums, or float32 ones of 16-bit parts, would not do."""
    tokens = jnp.asarray(np.arange(2**20) % 3, jnp.int32)
    got = jax.jit(sum_by_token, static_argnums=2)(jnp.ones((2**20, 1), jnp.bfloat16), tokens, 4)
    np.testing.assert_array_equal(got[:, 0], [349526, 349525, 349525, 0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_looked_up_and_derived(dtype):
    rng = np.random.default_rng(1)
    embedding = jnp.asarray(rng.normal(size=(9, D)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 9, (4, 40)), jnp.int32)
    d_out = jnp.asarray(rng.normal(size=(4, 40, D)), dtype)

    @jax.jit
    def both(embedding, d_out):
        out, back = jax.vjp(lambda embedding: look_up(embedding, tokens, jnp.dtype(dtype)), embedding)
        return out, back(d_out)[0]

    out, gradient = both(embedding, d_out)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, np.asarray(embedding)[np.asarray(tokens)].astype(dtype))
    wanted = sums(np.asarray(d_out).reshape(-1, D), np.asarray(tokens).reshape(-1), 9)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-5)


def test_a_row_that_is_not_finite_is_seen_in_its_token():
    tokens = np.repeat(np.arange(10), 200).astype(np.int32)
    rows = jnp.ones((2000, D)).at[250].set(jnp.inf)
    got = jax.jit(sum_by_token, static_argnums=2)(rows, tokens, 12)
    assert not np.isfinite(got[1]).any()
    np.testing.assert_array_equal(got[10:], 0)
