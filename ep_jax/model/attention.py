"""Grouped-query attention with QK-norm and RoPE, within documents, causal, optionally within a sliding window.

Three kernels, one result: `xla` is plain einsum and softmax, `cudnn` is NVIDIA's fused kernel, `tokamax` the one in
flash.py, which skips what a document cannot see. No key-value cache: this is for training.

Shapes: b sequences, L tokens of a sequence, D model width, N query heads, G key-value heads, R = N/G, h head width,
i queries of a block.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from ep_jax.fields import ConfigError
from ep_jax.model import flash
from ep_jax.model.config import ModelConfig
from ep_jax.model.norms import rms_norm
from ep_jax.model.parameters import gathered, norm_scale, weight
from ep_jax.model.rope import rotate

# Queries that the xla kernel scores at a time: bounds its [queries, keys] scores, which are recomputed in the backward.
QUERY_BLOCK = 512


class Attention(nnx.Module):
    """Projections, QK-norm, rotation, attention and the output projection."""

    def __init__(self, model: ModelConfig, *, window: int, stack: tuple[int, ...] = ()):
        """window: tokens a query may look back on, itself included; 0 = all. stack: leading axes of each parameter."""
        query_dim, key_dim = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        output_std = model.init_std * model.residual_scale
        self.model = model
        self.window = window
        self.query = weight("dense", (*stack, model.model_dim, query_dim), model.init_std)
        self.key = weight("dense", (*stack, model.model_dim, key_dim), model.init_std)
        self.value = weight("dense", (*stack, model.model_dim, key_dim), model.init_std)
        self.output = weight("dense", (*stack, query_dim, model.model_dim), output_std)
        self.query_norm = norm_scale((*stack, model.head_dim))
        self.key_norm = norm_scale((*stack, model.head_dim))

    def __call__(self, x_bLD: jax.Array, segments_bL: jax.Array, positions_bL: jax.Array) -> jax.Array:
        """Normed activations [b, L, D] in the compute dtype -> what attention adds to them, same shape and dtype."""
        model = self.model
        b, L, _ = x_bLD.shape

        def heads(param):
            return jnp.einsum("bld,dn->bln", x_bLD, gathered(param, x_bLD.dtype)).reshape(b, L, -1, model.head_dim)

        def normed_and_rotated(x_bLNh, scale):
            return rotate(rms_norm(x_bLNh, scale, model.norm_epsilon), positions_bL, model.rope_theta)

        q_bLNh = normed_and_rotated(heads(self.query), self.query_norm[...])
        k_bLGh = normed_and_rotated(heads(self.key), self.key_norm[...])
        kernel = choose_kernel(model, L)
        out_bLNh = attend(q_bLNh, k_bLGh, heads(self.value), segments_bL, window=self.window, kernel=kernel)
        return jnp.einsum("bln,nd->bld", out_bLNh.reshape(b, L, -1), gathered(self.output, x_bLD.dtype))


def choose_kernel(model: ModelConfig, sequence_length: int) -> str:
    """ "tokamax", "cudnn" or "xla": as asked for, or for "auto" the first of these that can run here.

    Raises ConfigError where tokamax, or without a GPU cudnn, is asked for.
    """
    reason = flash.why_not(model.head_dim, model.compute_dtype, sequence_length)
    if model.attention == "tokamax" and reason:
        raise ConfigError(f"model.attention = 'tokamax': {reason}; allowed here is auto or xla, and cudnn on GPUs")
    if model.attention == "cudnn" and jax.default_backend() != "gpu":
        raise ConfigError("model.attention = 'cudnn': it is for GPUs; allowed here is auto or xla")
    if model.attention != "auto":
        return model.attention
    if not reason:
        return "tokamax"
    fits = model.head_dim % 8 == 0 and model.head_dim <= 128 and sequence_length % 2 == 0
    return "cudnn" if jax.default_backend() == "gpu" and model.compute_dtype == "bfloat16" and fits else "xla"


def describe_kernel(model: ModelConfig, sequence_length: int) -> str:
    """For the start of a run: which kernel `choose_kernel` takes, and why not tokamax where that was open."""
    kernel = choose_kernel(model, sequence_length)
    if model.attention != "auto" or kernel == "tokamax":
        return kernel
    return f"{kernel}; not tokamax: {flash.why_not(model.head_dim, model.compute_dtype, sequence_length)}"


def attend(
    q_bLNh: jax.Array, k_bLGh: jax.Array, v_bLGh: jax.Array, segments_bL: jax.Array, *, window: int, kernel: str
) -> jax.Array:
    """softmax(q k / sqrt(h)) v over earlier tokens of the same document, window tokens back at most (0 = all).

    Query head n reads key-value head n // R. Softmax in float32; returns [b, L, N, h] in the dtype of q. Padding
    (segment 0) attends padding, so that no row is empty. Raises NotImplementedError where cudnn cannot run.
    """
    if kernel == "tokamax":
        return flash.attend(q_bLNh, k_bLGh, v_bLGh, flash.first_keys(segments_bL, window))
    if kernel == "cudnn":
        return _attend_cudnn(q_bLNh, k_bLGh, v_bLGh, segments_bL, window)
    return _attend_xla(q_bLNh, k_bLGh, v_bLGh, segments_bL, window)


def _attend_cudnn(q_bLNh, k_bLGh, v_bLGh, segments_bL, window):
    same_document_b1LL = (segments_bL[:, :, None] == segments_bL[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q_bLNh,
        k_bLGh,
        v_bLGh,
        mask=same_document_b1LL,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation="cudnn",
    )


def _attend_xla(q_bLNh, k_bLGh, v_bLGh, segments_bL, window):
    b, L, N, h = q_bLNh.shape
    G = k_bLGh.shape[2]
    attend_block = functools.partial(_attend_query_block, k_bLGh, v_bLGh, segments_bL, window)
    if L <= QUERY_BLOCK or L % QUERY_BLOCK:
        out = attend_block(q_bLNh.reshape(b, L, G, N // G, h), segments_bL, jnp.arange(L))
        return out.reshape(b, L, N, h)
    blocks = L // QUERY_BLOCK
    q_blocks = jnp.moveaxis(q_bLNh.reshape(b, blocks, QUERY_BLOCK, G, N // G, h), 1, 0)
    segment_blocks = jnp.moveaxis(segments_bL.reshape(b, blocks, QUERY_BLOCK), 1, 0)
    index_blocks = jnp.arange(L).reshape(blocks, QUERY_BLOCK)
    out = jax.lax.map(lambda block: jax.checkpoint(attend_block)(*block), (q_blocks, segment_blocks, index_blocks))
    return jnp.moveaxis(out, 0, 1).reshape(b, L, N, h)


def _attend_query_block(k_bLGh, v_bLGh, segments_bL, window, q_biGRh, segments_bi, index_i):
    """Some queries, with their segments and places in the row, against all keys."""
    distance_iL = index_i[:, None] - jnp.arange(k_bLGh.shape[1])[None, :]
    seen_iL = (distance_iL >= 0) & (distance_iL < window) if window else distance_iL >= 0
    seen_biL = seen_iL[None] & (segments_bi[:, :, None] == segments_bL[:, None, :])
    scores = jnp.einsum("bigrh,blgh->bgril", q_biGRh, k_bLGh, preferred_element_type=jnp.float32)
    scores = jnp.where(seen_biL[:, None, None], scores * q_biGRh.shape[-1] ** -0.5, -jnp.inf)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v_bLGh.dtype)
    out = jnp.einsum("bgril,blgh->bigrh", probabilities, v_bLGh, preferred_element_type=jnp.float32)
    return out.astype(q_biGRh.dtype)
