"""Cross entropy and the router losses: float32, and sums rather than means.

A caller divides by the count of the whole step, so that adding over devices and microbatches gives the mean, and a
device without a valid target adds zero.

Shapes: T tokens, D model width, V vocabulary, E experts, c tokens of a chunk.
"""

import functools

import jax
import jax.numpy as jnp


def cross_entropy_sum(
    x_TD: jax.Array, head_DV: jax.Array, targets_T: jax.Array, valid_T: jax.Array, chunk_tokens: int = 0
) -> jax.Array:
    """Sum over valid tokens of -log softmax(x head)[target], float32 [].

    x in the compute dtype, head in any float dtype (cast to that of x; its gradient is summed over the chunks in its
    own). Logits are float32, for chunk_tokens tokens at a time (0 = all) and recomputed in the backward pass when
    chunked, so that the full [T, V] never exists. Targets of invalid tokens are ignored.
    """
    T = x_TD.shape[0]
    targets_T = jnp.where(valid_T, targets_T, 0)
    if chunk_tokens == 0 or chunk_tokens >= T:
        return _chunk_sum(head_DV, x_TD, targets_T, valid_T)
    chunks = -(-T // chunk_tokens)
    padding = chunks * chunk_tokens - T

    def chunked(array):
        widths = [(0, padding)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, widths).reshape(chunks, chunk_tokens, *array.shape[1:])

    one_chunk = jax.checkpoint(functools.partial(_chunk_sum, head_DV))
    sums = jax.lax.map(lambda chunk: one_chunk(*chunk), (chunked(x_TD), chunked(targets_T), chunked(valid_T)))
    return jnp.sum(sums)


def load_balance_sum(counts_E: jax.Array, probability_sum_E: jax.Array) -> jax.Array:
    """E * sum_e f_e * (sum of probabilities of e), float32 []; over the tokens' count it is 1.0 when balanced.

    counts: int32, over the whole microbatch, not differentiated; f_e = counts_e / (K * tokens) is its share of all
    assignments. probability_sum: this device's RouterStats.probability_sum.
    """
    total = jnp.maximum(jnp.sum(counts_E, dtype=jnp.int32), 1)
    share_E = jax.lax.stop_gradient(counts_E.astype(jnp.float32) / total.astype(jnp.float32))
    return counts_E.shape[0] * jnp.sum(share_E * probability_sum_E)


def _chunk_sum(head_DV, x_cD, targets_c, valid_c):
    logits_cV = jnp.einsum("cd,dv->cv", x_cD, head_DV.astype(x_cD.dtype), preferred_element_type=jnp.float32)
    # Chosen by comparison, not by index: its gradient is then no scatter into zeros of the size of the logits.
    is_target_cV = targets_c[:, None] == jnp.arange(logits_cV.shape[1], dtype=targets_c.dtype)[None]
    target_logit_c = jnp.sum(jnp.where(is_target_cV, logits_cV, 0.0), axis=-1)
    # A target outside the vocabulary is a loss that is not finite, which stops the run, and not a plausible one.
    is_id_c = (targets_c >= 0) & (targets_c < logits_cV.shape[1])
    target_logit_c = jnp.where(is_id_c, target_logit_c, jnp.nan)
    return jnp.sum(jnp.where(valid_c, jax.nn.logsumexp(logits_cV, axis=-1) - target_logit_c, 0.0))
