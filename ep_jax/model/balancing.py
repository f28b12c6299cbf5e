"""Next step's router bias from integer sums over the whole step: quantile balancing and the aux-free sign bias.

Pure functions of summed integers, so every mesh computes the same bias from the same counts. They move no gradient.

Quantile balancing (DESIGN 4b). Let alpha_t be token t's (K+1)-th biased score; expert e is among its K choices when
score_te + bias_e > alpha_t, that is when the margin score_te - alpha_t exceeds -bias_e. A share K/E of the tokens does
so when -bias_e is the (1 - K/E) quantile beta_e of the margins. Hence bias_e = -(beta_e - mean(beta)): the mean
changes no choice and is removed to keep the bias bounded.

Why the range [-2, 2] holds every margin: scores lie in [0, 1], so the margins of two experts differ by at most 1 at
every token, hence so do their quantiles, and a bias that is zero or came from here lies in [-1, 1]. Then alpha, one of
the biased scores, lies in [-1, 2], and score - alpha in [-2, 2].

Shapes: L layers, T tokens, E experts, B bins.
"""

import jax
import jax.numpy as jnp

from ep_jax.model.config import RouterConfig

MARGIN_LIMIT = 2.0


def initial_bias(num_layers: int, num_experts: int) -> jax.Array:
    """Float32 [L, E] zeros."""
    return jnp.zeros((num_layers, num_experts), jnp.float32)


def histogram(margin_TE: jax.Array, valid_T: jax.Array, bins: int) -> jax.Array:
    """Counts the margins of valid tokens per expert in equal bins over [-2, 2]: int32 [E, B]."""
    num_experts = margin_TE.shape[1]
    bin_TE = jnp.floor((margin_TE + MARGIN_LIMIT) * (bins / (2 * MARGIN_LIMIT))).astype(jnp.int32)
    flat_TE = jnp.clip(bin_TE, 0, bins - 1) + bins * jnp.arange(num_experts, dtype=jnp.int32)[None, :]
    ones_TE = jnp.broadcast_to(valid_T[:, None], flat_TE.shape).astype(jnp.int32)
    return jnp.zeros(num_experts * bins, jnp.int32).at[flat_TE].add(ones_TE).reshape(num_experts, bins)


def next_bias(bias_LE: jax.Array, stats, config: RouterConfig) -> jax.Array:
    """The bias of the next step, float32 [L, E].

    stats: RouterStats with a leading layer axis, summed over the devices and microbatches of the step. A step without
    valid tokens changes nothing. Evaluation does not call this.
    """
    if config.balancing == "quantile":
        return quantile_bias(bias_LE, stats.histogram, config.experts_per_token)
    if config.balancing == "sign_bias":
        return sign_bias(bias_LE, stats.counts, config.sign_bias_rate)
    return bias_LE


def quantile_bias(bias_LE: jax.Array, histogram_LEB: jax.Array, experts_per_token: int) -> jax.Array:
    """-(beta - mean(beta)) per layer, beta_e being the (1 - K/E) quantile of expert e's margins."""
    num_experts = bias_LE.shape[-1]
    beta_LE = histogram_quantile(histogram_LEB, num_experts - experts_per_token, num_experts)
    new_bias_LE = jnp.mean(beta_LE, axis=-1, keepdims=True) - beta_LE
    any_token_L = jnp.sum(histogram_LEB[:, 0, :], axis=-1) > 0
    return jnp.where(any_token_L[:, None], new_bias_LE, bias_LE)


def histogram_quantile(histogram_xB: jax.Array, numerator: int, denominator: int) -> jax.Array:
    """The numerator/denominator quantile of each int32 histogram [..., B] over [-2, 2], float32 [...].

    The value below which that share of the counts lies, counts being spread evenly inside a bin: within one bin width
    of the order statistic of rank ceil(share * count). The rank is exact integer arithmetic.
    """
    bins = histogram_xB.shape[-1]
    cumulative_xB = jnp.cumsum(histogram_xB, axis=-1, dtype=jnp.int32)
    total = cumulative_xB[..., -1]
    rest = total % denominator * numerator
    whole = total // denominator * numerator + rest // denominator  # floor(total * numerator / denominator)
    fraction = (rest % denominator).astype(jnp.float32) / denominator
    rank = jnp.maximum(whole + (rest % denominator > 0), 1)
    bin_x = jnp.argmax(cumulative_xB >= rank[..., None], axis=-1)
    in_bin = jnp.maximum(jnp.take_along_axis(histogram_xB, bin_x[..., None], axis=-1)[..., 0], 1)
    below = jnp.take_along_axis(cumulative_xB, bin_x[..., None], axis=-1)[..., 0] - in_bin
    inside = ((whole - below).astype(jnp.float32) + fraction) / in_bin.astype(jnp.float32)
    return (bin_x.astype(jnp.float32) + inside) * (2 * MARGIN_LIMIT / bins) - MARGIN_LIMIT


def sign_bias(bias_LE: jax.Array, counts_LE: jax.Array, rate: float) -> jax.Array:
    """Moves the bias by rate, up where an expert got fewer assignments than the mean and down where it got more.

    The comparison with the mean is exact in integers.
    """
    total_L1 = jnp.sum(counts_LE, axis=-1, keepdims=True, dtype=jnp.int32)
    mean_floor, rest = jnp.divmod(total_L1, counts_LE.shape[-1])
    above_LE = counts_LE > mean_floor
    below_LE = (counts_LE < mean_floor) | ((counts_LE == mean_floor) & (rest > 0))
    return bias_LE + rate * (below_LE.astype(jnp.float32) - above_LE.astype(jnp.float32))
