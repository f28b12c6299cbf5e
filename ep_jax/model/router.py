"""Chooses experts and combine weights for every token, and sums what balancing and the router losses need.

Everything is float32 and local to this device: no collective here. What the sums become is in `balancing.py` (next
step's bias) and `loss.py` (load-balance and z-loss).

Shapes: T tokens, D model width, E experts, K choices of a token, B histogram bins.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ep_jax.model import balancing
from ep_jax.model.config import RouterConfig
from ep_jax.model.exact import float32_product

# Scores are divided by no less: its square, which the gradient divides by, must stay a normal float32.
SMALLEST_SUM = 1e-12


class Choices(NamedTuple):
    """Which experts each token takes, best biased score first, and what their results weigh."""

    expert_ids: jax.Array  # int32 [T, K], distinct in a row
    weights: jax.Array  # float32 [T, K], unbiased scores scaled to a constant sum


class RouterStats(NamedTuple):
    """Sums over the valid tokens of this device; add them over devices and microbatches."""

    counts: jax.Array  # int32 [E], assignments of each expert
    probability_sum: jax.Array  # float32 [E], of scores scaled to sum 1 per token
    z_sum: jax.Array  # float32 [], of logsumexp(logits)^2
    histogram: jax.Array | None  # int32 [E, B], of score - alpha; None unless balancing is "quantile"


def route(
    x_TD: jax.Array, weight_DE: jax.Array, bias_E: jax.Array, valid_T: jax.Array, config: RouterConfig
) -> tuple[Choices, RouterStats]:
    """Routes tokens [T, D] of any float dtype; the bias moves the choice only, never weights or losses.

    Gradients reach the router's weight through the combine weights, probability_sum and z_sum.
    """
    logits_TE = float32_product(x_TD, weight_DE)
    scores_TE = jax.nn.sigmoid(logits_TE) if config.scores == "sigmoid" else jax.nn.softmax(logits_TE, axis=-1)
    top, alpha_T = choose(scores_TE, bias_E, config.experts_per_token)
    histogram = None
    if config.balancing == "quantile":
        margin_TE = jax.lax.stop_gradient(scores_TE) - alpha_T[:, None]
        histogram = balancing.histogram(margin_TE, valid_T, config.histogram_bins)
    stats = RouterStats(
        counts=count_choices(top, valid_T, config.num_experts),
        probability_sum=jnp.sum(jnp.where(valid_T[:, None], scaled_to_sum(scores_TE, 1.0), 0.0), axis=0),
        z_sum=jnp.sum(jnp.where(valid_T, jax.nn.logsumexp(logits_TE, axis=-1) ** 2, 0.0)),
        histogram=histogram,
    )
    return Choices(top, scaled_to_sum(scores_of(scores_TE, top, config.num_experts), config.weight_sum)), stats


def choose(scores_TE: jax.Array, bias_E: jax.Array, experts_per_token: int) -> tuple[jax.Array, jax.Array]:
    """The top K of score + bias as int32 [T, K] (ties to the lower expert), and alpha [T], the (K+1)-th biased score.

    With K = E there is no such score; alpha is then the K-th, and quantile balancing is refused by the config.
    """
    biased_TE = jax.lax.stop_gradient(scores_TE) + bias_E[None, :]
    values, ids = jax.lax.top_k(biased_TE, min(experts_per_token + 1, scores_TE.shape[-1]))
    return ids[:, :experts_per_token].astype(jnp.int32), values[:, -1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def scores_of(scores_TE: jax.Array, expert_ids_TK: jax.Array, num_experts: int) -> jax.Array:
    """[T, K]: the scores of each token's experts. Ids are distinct in a row, so that its gradient is no scatter-add."""
    del num_experts
    return jnp.take_along_axis(scores_TE, expert_ids_TK, axis=-1)


def _scores_of_forward(scores_TE, expert_ids_TK, num_experts):
    return scores_of(scores_TE, expert_ids_TK, num_experts), expert_ids_TK


def _scores_of_backward(num_experts, expert_ids_TK, d_chosen_TK):
    matches_TKE = jax.nn.one_hot(expert_ids_TK, num_experts, dtype=bool)
    return jnp.sum(jnp.where(matches_TKE, d_chosen_TK[:, :, None], 0), axis=1), None


scores_of.defvjp(_scores_of_forward, _scores_of_backward)


def count_choices(expert_ids_TK: jax.Array, valid_T: jax.Array, num_experts: int) -> jax.Array:
    """Assignments of valid tokens to each expert, exact: int32 [E]."""
    matches_TKE = jax.nn.one_hot(expert_ids_TK, num_experts, dtype=bool)
    return jnp.sum(matches_TKE & valid_T[:, None, None], axis=(0, 1), dtype=jnp.int32)


def scaled_to_sum(scores: jax.Array, total: float) -> jax.Array:
    """Scales the last axis to a sum; scores that all underflowed to zero stay zero instead of becoming NaN."""
    return scores * (total / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), SMALLEST_SUM))
