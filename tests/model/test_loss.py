"""Cross entropy against NumPy, chunks, and the balance-loss numbers of the faults list."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.model.config import RouterConfig
from ep_jax.model.loss import cross_entropy_sum, load_balance_sum
from ep_jax.model.router import route

T, D, V = 30, 8, 101
LOSS = jax.jit(cross_entropy_sum, static_argnums=4)
LOSS_AND_GRADIENTS = jax.jit(jax.value_and_grad(cross_entropy_sum, argnums=(0, 1)), static_argnums=4)


def random_case(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(T, D)), rng.normal(size=(D, V)), rng.integers(0, V, T), rng.random(T) < 0.7


def test_cross_entropy_equals_numpy():
    x, head, targets, valid = random_case()
    logits = x @ head
    expected = (np.log(np.exp(logits).sum(-1)) - logits[np.arange(T), targets])[valid].sum()
    out = LOSS(jnp.asarray(x, jnp.float32), jnp.asarray(head, jnp.float32), targets, valid)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    # What stands at an invalid place does not matter, not even an id outside the vocabulary.
    garbage = np.where(valid, targets, V + 5)
    out = LOSS(jnp.asarray(x, jnp.float32), jnp.asarray(head, jnp.float32), garbage, valid)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize("chunk", [10, 7, 64])
def test_chunks_change_neither_value_nor_gradient(chunk):
    x, head, targets, valid = random_case()
    x, head = jnp.asarray(x, jnp.float32), jnp.asarray(head, jnp.float32)
    whole = LOSS_AND_GRADIENTS(x, head, targets, valid, 0)
    chunked = LOSS_AND_GRADIENTS(x, head, targets, valid, chunk)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), whole, chunked)


def test_chunked_loss_never_holds_all_logits():
    x, head, targets, valid = random_case()
    x, head = jnp.asarray(x, jnp.float32), jnp.asarray(head, jnp.float32)

    def program(chunk):
        return str(jax.make_jaxpr(jax.grad(lambda x, h: cross_entropy_sum(x, h, targets, valid, chunk)))(x, head))

    def holds_all_logits(text):
        return f"f32[{T},{V}]" in text or f"f32[3,10,{V}]" in text

    assert holds_all_logits(program(0))
    assert not holds_all_logits(program(10))


@pytest.mark.parametrize("chunk", [0, 10])
def test_no_valid_target_gives_zero_loss_and_gradient(chunk):
    x, head, targets, _ = random_case()
    loss, gradients = LOSS_AND_GRADIENTS(
        jnp.asarray(x, jnp.float32), jnp.asarray(head, jnp.float32), targets, np.zeros(T, bool), chunk
    )
    assert loss == 0
    assert not any(np.any(gradient) for gradient in gradients)


@functools.partial(jax.jit, static_argnums=(1, 2))
def balance_of_logits(logits, K, scores):
    """The load-balance loss of one layer whose tokens have these logits."""
    num_tokens, E = logits.shape
    config = RouterConfig(num_experts=E, experts_per_token=K, scores=scores, balancing="none")
    valid = jnp.ones(num_tokens, bool)
    _, stats = route(jnp.asarray(logits, jnp.float32), jnp.eye(E), jnp.zeros(E), valid, config)
    return load_balance_sum(stats.counts, stats.probability_sum) / num_tokens


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
@pytest.mark.parametrize("K", [1, 2, 4])
def test_balanced_load_gives_one_for_every_k(K, scores):
    """BL-20: near-uniform logits, token t to experts t .. t+K-1 mod 8."""
    logits = np.zeros((64, 8))
    for t in range(64):
        logits[t, [(t + k) % 8 for k in range(K)]] = 1e-4
    np.testing.assert_allclose(balance_of_logits(logits, K, scores), 1.0, atol=1e-3)


def test_softmax_is_applied_once():
    """BL-22: all tokens with logits (4, 0, 0, 0) give 3.7917; a second softmax would give 1.8323."""
    np.testing.assert_allclose(balance_of_logits(np.tile([4.0, 0, 0, 0], (32, 1)), 1, "softmax"), 3.7917, atol=1e-4)


def test_the_share_of_assignments_is_not_differentiated():
    gradient = jax.grad(lambda p: load_balance_sum(jnp.array([3, 1], jnp.int32), p))(jnp.array([0.5, 0.5]))
    np.testing.assert_allclose(gradient, [1.5, 0.5])


@pytest.mark.parametrize("target", [-1, V, V + 7])
def test_a_valid_target_outside_the_vocabulary_is_no_plausible_loss(target):
    x, head, targets, _ = random_case()
    targets[3] = target
    arrays = (jnp.asarray(x, jnp.float32), jnp.asarray(head, jnp.float32), jnp.asarray(targets))
    assert np.isnan(LOSS(*arrays, jnp.ones(T, bool), 0))
    assert np.isfinite(LOSS(*arrays, jnp.arange(T) != 3, 0))
