"""The router bias: quantiles against sorted float64 margins, convergence, exact sign steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.model import balancing
from ep_jax.model.config import RouterConfig
from ep_jax.model.router import RouterStats, choose, count_choices

NEXT_BIAS = jax.jit(balancing.next_bias, static_argnums=2)


@functools.partial(jax.jit, static_argnums=3)
def stats_of(scores_TE, bias_E, valid_T, config):
    """RouterStats of one layer of one device, from given scores."""
    ids, alpha_T = choose(scores_TE, bias_E, config.experts_per_token)
    histogram = balancing.histogram(scores_TE - alpha_T[:, None], valid_T, config.histogram_bins)
    counts = count_choices(ids, valid_T, config.num_experts)
    return RouterStats(counts[None], jnp.zeros(1), jnp.zeros(1), histogram[None])


def skewed_scores(T, E, seed=0):
    """Sigmoid scores whose popularity differs a lot between experts."""
    rng = np.random.default_rng(seed)
    return 1 / (1 + np.exp(-(rng.normal(size=(T, E)) + np.linspace(-2, 2, E))))


@pytest.mark.parametrize(("K", "E"), [(1, 8), (2, 8), (3, 5), (7, 8)])
def test_quantile_bias_equals_sorted_margins_to_a_bin(K, E):
    config = RouterConfig(num_experts=E, experts_per_token=K)
    scores, valid = skewed_scores(1000, E), np.random.default_rng(1).random(1000) < 0.7
    bias = np.random.default_rng(2).normal(size=E) * 0.1
    stats = stats_of(jnp.asarray(scores, jnp.float32), jnp.asarray(bias, jnp.float32), jnp.asarray(valid), config)
    out = NEXT_BIAS(jnp.asarray(bias, jnp.float32)[None], stats, config)

    alpha = np.sort(scores + bias, axis=-1)[:, E - K - 1]
    margins = (scores - alpha[:, None])[valid]
    beta = np.quantile(margins, 1 - K / E, axis=0, method="inverted_cdf")
    bin_width = 4 / config.histogram_bins
    np.testing.assert_allclose(out[0], -(beta - beta.mean()), atol=2 * bin_width)
    assert abs(float(out.sum())) < 1e-5


@pytest.mark.parametrize(("E", "K"), [(16, 2), (8, 3)])
def test_loads_are_balanced_once_the_bias_has_converged(E, K):
    config = RouterConfig(num_experts=E, experts_per_token=K)
    scores, valid = jnp.asarray(skewed_scores(4096, E), jnp.float32), jnp.ones(4096, bool)

    @jax.jit
    def update(bias_LE):
        stats = stats_of(scores, bias_LE[0], valid, config)
        return balancing.next_bias(bias_LE, stats, config), stats.counts[0]

    bias, first_counts = update(balancing.initial_bias(1, E))
    for _ in range(20):
        bias, counts = update(bias)
    mean = 4096 * K / E
    assert first_counts.max() > 1.5 * mean
    assert counts.max() < 1.05 * mean
    assert counts.min() > 0.9 * mean
    assert np.abs(bias).max() < 1  # the bound that makes the histogram range wide enough


def test_histogram_sums_over_parts_give_the_same_bias():
    config = RouterConfig(num_experts=8, experts_per_token=2)
    scores, bias = jnp.asarray(skewed_scores(512, 8), jnp.float32), jnp.zeros((1, 8))
    whole = stats_of(scores, bias[0], jnp.ones(512, bool), config)
    parts = [stats_of(part, bias[0], jnp.ones(64, bool), config) for part in jnp.split(scores, 8)]
    summed = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    np.testing.assert_array_equal(whole.histogram, summed.histogram)
    np.testing.assert_array_equal(NEXT_BIAS(bias, whole, config), NEXT_BIAS(bias, summed, config))


def test_no_margin_falls_outside_the_histogram():
    """The extreme case: scores 0 and 1, biases -1 and 1."""
    margins = jnp.array([[-2.0, 2.0], [-3.0, 3.0]])
    counts = jax.jit(balancing.histogram, static_argnums=2)(margins, jnp.ones(2, bool), 16)
    np.testing.assert_array_equal(counts.sum(-1), [2, 2])
    assert counts[0, 0] == counts[1, 15] == 2


def test_quantile_of_a_histogram_by_hand():
    """Bins of width 1 over [-2, 2]; half of 4 counts lies one third into the bin that starts at 0."""
    histogram = jnp.array([[1, 0, 3, 0]], jnp.int32)
    np.testing.assert_allclose(balancing.histogram_quantile(histogram, 1, 2), [1 / 3], rtol=1e-6)
    np.testing.assert_allclose(balancing.histogram_quantile(histogram, 1, 4), [-1.0], rtol=1e-6)
    np.testing.assert_allclose(balancing.histogram_quantile(histogram, 7, 8), [0 + 2.5 / 3], rtol=1e-6)


def test_quantile_rank_is_exact_for_large_counts():
    """2^30 tokens would lose the rank in float32 or overflow count * E in int32."""
    n = 2**30
    histogram = jnp.array([[n - n // 8, n // 8, 0, 0]], jnp.int32)
    np.testing.assert_allclose(balancing.histogram_quantile(histogram, 7, 8), [-1.0], rtol=1e-6)


@pytest.mark.parametrize("name", ["quantile", "sign_bias", "none"])
def test_a_step_without_tokens_or_without_balancing_keeps_the_bias(name):
    config = RouterConfig(num_experts=4, experts_per_token=2, balancing=name)
    bias = jnp.array([[0.3, -0.1, -0.2, 0.0]])
    empty = RouterStats(jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 4)), jnp.zeros(1), jnp.zeros((1, 4, 64), jnp.int32))
    np.testing.assert_array_equal(NEXT_BIAS(bias, empty, config), bias)


def test_sign_bias_compares_with_the_exact_mean():
    counts = jnp.array([[10, 10, 10, 11], [5, 5, 5, 5], [2**30, 2**30 - 1, 0, 0]], jnp.int32)
    out = jax.jit(balancing.sign_bias)(jnp.zeros((3, 4)), counts, 0.5)
    np.testing.assert_array_equal(out, [[0.5, 0.5, 0.5, -0.5], [0, 0, 0, 0], [-0.5, -0.5, 0.5, 0.5]])
