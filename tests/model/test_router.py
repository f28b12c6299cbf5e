"""Routing against NumPy float64, exact counts, and what reaches the gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ep_jax.model.config import RouterConfig
from ep_jax.model.router import choose, route, scores_of


def random_case(T=64, D=12, E=8, seed=0):
    rng = np.random.default_rng(seed)
    x, weight = rng.normal(size=(T, D)), rng.normal(size=(D, E)) / np.sqrt(D)
    bias, valid = rng.normal(size=E) * 0.1, rng.random(T) < 0.8
    return x, weight, bias, valid


def as_jax(x, weight, bias, valid):
    return jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), jnp.asarray(bias, jnp.float32), valid


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
@pytest.mark.parametrize("K", [1, 3])
def test_route_equals_numpy(scores, K):
    case = x, weight, bias, valid = random_case()
    config = RouterConfig(num_experts=8, experts_per_token=K, scores=scores, weight_sum=2.5, histogram_bins=64)
    choices, stats = jax.jit(route, static_argnums=4)(*as_jax(*case), config)

    logits = x @ weight
    exponentials = np.exp(logits)
    expected = 1 / (1 + 1 / exponentials) if scores == "sigmoid" else exponentials / exponentials.sum(-1, keepdims=True)
    order = np.argsort(-(expected + bias), axis=-1)
    ids = order[:, :K]
    np.testing.assert_array_equal(choices.expert_ids, ids)
    chosen = np.take_along_axis(expected, ids, -1)
    np.testing.assert_allclose(choices.weights, 2.5 * chosen / chosen.sum(-1, keepdims=True), rtol=1e-5)

    np.testing.assert_array_equal(stats.counts, np.bincount(ids[valid].ravel(), minlength=8))
    probabilities = expected / expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(stats.probability_sum, probabilities[valid].sum(0), rtol=1e-5)
    np.testing.assert_allclose(stats.z_sum, (np.log(exponentials.sum(-1))[valid] ** 2).sum(), rtol=1e-5)

    alpha = np.take_along_axis(expected + bias, order[:, K : K + 1], -1)
    bins = np.floor((expected - alpha + 2) * 16).astype(int)
    for e in range(8):
        np.testing.assert_array_equal(stats.histogram[e], np.bincount(bins[valid, e], minlength=64))
    dtypes = (choices.expert_ids, choices.weights, stats.counts, stats.histogram, stats.probability_sum, stats.z_sum)
    assert [str(array.dtype) for array in dtypes] == ["int32", "float32", "int32", "int32", "float32", "float32"]


def test_ties_go_to_the_lower_expert_and_all_experts_can_be_chosen():
    ids, _ = choose(jnp.zeros((3, 4)), jnp.zeros(4), 4)
    np.testing.assert_array_equal(ids, np.tile(np.arange(4), (3, 1)))


def test_a_score_gets_the_gradient_of_its_choice():
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(8)[:3] for _ in range(16)])
    d_chosen, wanted = rng.normal(size=ids.shape), np.zeros((16, 8))
    for t, k in np.ndindex(ids.shape):
        wanted[t, ids[t, k]] += d_chosen[t, k]
    scores = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)
    chosen, pull = jax.vjp(jax.jit(lambda scores: scores_of(scores, jnp.asarray(ids, jnp.int32), 8)), scores)
    np.testing.assert_array_equal(chosen, np.take_along_axis(np.asarray(scores), ids, axis=1))
    np.testing.assert_allclose(pull(jnp.asarray(d_chosen, jnp.float32))[0], wanted, rtol=1e-6)


def test_scores_that_underflow_give_finite_weights_and_gradients():
    config = RouterConfig(num_experts=4, experts_per_token=2)

    def total(weight):
        choices, _ = route(jnp.ones((3, 2)), weight, jnp.zeros(4), np.ones(3, bool), config)
        return jnp.sum(choices.weights)

    value, gradient = jax.jit(jax.value_and_grad(total))(jnp.full((2, 4), -1e4))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
def test_the_bias_moves_choices_but_neither_weights_nor_gradients(scores):
    x, weight, _, valid = random_case()
    config = RouterConfig(num_experts=8, experts_per_token=2, scores=scores)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def weighted(weight, bias):
        choices, stats = route(*as_jax(x, weight, bias, valid), config)
        return jnp.sum(choices.weights[:, 0]), (choices, stats)

    (_, (plain, plain_stats)), (gradient, bias_gradient) = weighted(weight, np.zeros(8))
    # The same shift of every expert changes no choice, so nothing at all may change.
    (_, (shifted, _)), (shifted_gradient, _) = weighted(weight, np.full(8, 0.5))
    np.testing.assert_array_equal(plain.expert_ids, shifted.expert_ids)
    np.testing.assert_array_equal(plain.weights, shifted.weights)
    np.testing.assert_array_equal(gradient, shifted_gradient)
    (_, (pulled, pulled_stats)), _ = weighted(weight, np.eye(8)[5] * 3)
    assert (pulled.expert_ids[:, 0] == 5).all()
    np.testing.assert_array_equal(pulled_stats.probability_sum, plain_stats.probability_sum)
    assert not np.any(bias_gradient)


def test_counts_are_exact_integers_beyond_the_range_of_bfloat16():
    """BL-23: 600 bfloat16 tokens on each of 8 devices, all to one expert, count 4800."""
    config = RouterConfig(num_experts=8, experts_per_token=1)
    weight = jnp.zeros((4, 8)).at[:, 3].set(1.0)

    def local(x_TD):
        _, stats = route(x_TD, weight, jnp.zeros(8), jnp.ones(x_TD.shape[0], bool), config)
        return jax.lax.psum((stats.counts, stats.histogram), "data")

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    counts, histogram = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P()))(
        jnp.ones((8 * 600, 4), jnp.bfloat16)
    )
    assert counts.dtype == histogram.dtype == jnp.int32
    np.testing.assert_array_equal(counts, [0, 0, 0, 4800, 0, 0, 0, 0])
    np.testing.assert_array_equal(histogram.sum(-1), [4800] * 8)
