"""Attention over packed documents by tokamax's FlashAttention for Hopper GPUs (Pallas Mosaic GPU), with its derivative.

A query is told the first key of its document (or of its window), so nothing of the size [queries, keys] is in memory,
and the forward pass skips blocks of keys before it. cuDNN wants a mask of [L, L] for that, or a workspace of the size
of the queries for each document that a row may have (experiments/LOG.md).

Its public function does not take first keys, so its operators are called.

Shapes: b sequences, L tokens of a sequence, N query heads, G key-value heads, h head width.
"""

import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_jax.mesh import varying_axes

TOKAMAX = "0.0.17"  # its operators are not its public face, and may change with any version
TILE = 128  # queries and keys at a time; parts of one are not tested
# What the derivative needs beside queries, keys and values: a remat policy that keeps it does not attend again.
RESIDUAL_NAME = "attention_results"


def why_not(head_dim: int, dtype: str, length: int) -> str:
    """Why this kernel cannot run here for such heads and rows of `length` tokens; empty where it can."""
    if jax.default_backend() != "gpu" or getattr(jax.devices()[0], "compute_capability", "") != "9.0":
        return f"it is for Hopper GPUs, this is {jax.devices()[0].device_kind}"
    if dtype != "bfloat16":
        return f"it computes in bfloat16, model.compute_dtype is {dtype}"
    if head_dim > 128 or head_dim % 8:
        return f"it takes heads of up to 128 columns in eights, model.head_dim is {head_dim}"
    if length % TILE:
        return f"it takes rows of a multiple of {TILE} tokens, data.sequence_length is {length}"
    try:
        found = importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    return "" if found == TOKAMAX else f"it needs tokamax {TOKAMAX}, found {found} (pip install 'ep-jax[cuda]')"


def first_keys(segments_bL: jax.Array, window: int) -> jax.Array:
    """int32 [b, L]: the first key that each query attends; the segments of a row are contiguous.

    window: tokens a query may look back on, itself included; 0 = to the beginning of its document.
    """
    index_1L = jnp.arange(segments_bL.shape[1], dtype=jnp.int32)[None]
    begins_bL = jnp.pad(segments_bL[:, 1:] != segments_bL[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first_bL = lax.cummax(jnp.where(begins_bL, index_1L, 0), axis=1)
    return jnp.maximum(first_bL, index_1L - window + 1) if window else first_bL


@jax.custom_vjp
def attend(q_bLNh: jax.Array, k_bLGh: jax.Array, v_bLGh: jax.Array, first_bL: jax.Array) -> jax.Array:
    """softmax(q k / sqrt(h)) v over the keys from first_bL to the query itself; [b, L, N, h] in the dtype of q."""
    return _forward(q_bLNh, k_bLGh, v_bLGh, first_bL)[0]


def _forward(q_bLNh, k_bLGh, v_bLGh, first_bL):
    results = _hidden_from_mesh(_forward_kernel, q_bLNh, k_bLGh, v_bLGh, first_bL)
    out_bLNh, statistics = jax.tree.map(lambda array: checkpoint_name(array, RESIDUAL_NAME), results)
    return out_bLNh, (q_bLNh, k_bLGh, v_bLGh, first_bL, out_bLNh, statistics)


def _backward(residuals, d_out_bLNh):
    gradients = _hidden_from_mesh(_backward_kernel, *residuals, d_out_bLNh)
    return gradients["q"], gradients["k"], gradients["v"], None


attend.defvjp(_forward, _backward)


# Jitted, so that a model of many layers traces each of them once.
@jax.jit
def _forward_kernel(q_bLNh, k_bLGh, v_bLGh, first_bL):
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    operator = PallasMosaicGpuFlashAttention()
    arguments = dict(mask=_mask(first_bL), return_residuals=True)
    bound = operator.bind(q_bLNh, k_bLGh, v_bLGh, **arguments)
    # Asked for by name: looking for a tuned configuration, which there is none of, writes a warning.
    return operator.replace(config=bound.heuristics_config)(q_bLNh, k_bLGh, v_bLGh, **arguments)


@jax.jit
def _backward_kernel(q_bLNh, k_bLGh, v_bLGh, first_bL, out_bLNh, statistics, d_out_bLNh):
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention
    from tokamax._src.ops.attention.pallas_mosaic_gpu_vjp import PallasMosaicGpuFlashAttentionVjp

    forward = PallasMosaicGpuFlashAttention().bind(q_bLNh, k_bLGh, v_bLGh, mask=_mask(first_bL))
    operator = PallasMosaicGpuFlashAttentionVjp()
    bound = operator.bind(statistics, out_bLNh, d_out_bLNh, *forward.args, **forward.kwargs)
    return operator.replace(config=bound.heuristics_config)(*bound.args, **bound.kwargs)


def _mask(first_bL: jax.Array) -> Any:
    from tokamax._src.ops.attention.base import Mask

    return Mask(k_start=first_bL[:, None], is_causal=True)


def _hidden_from_mesh(kernel: Callable[..., Any], *arrays: Any) -> Any:
    """kernel(*arrays) without JAX's types of varying values, which tokamax's kernels do not carry through shard_map.

    What it returns varies over every mesh axis over which an argument does; a kernel mixes nothing between devices.
    """
    from jax._src import config  # no public switch: shard_map has one, for all it contains

    axes = tuple(sorted(frozenset().union(*map(varying_axes, jax.tree.leaves(arrays)))))
    with config._check_vma(False):
        # Each array is made anew, by operations that cost nothing, to lose its type.
        plain = jax.tree.map(lambda array: lax.squeeze(lax.expand_dims(array, (0,)), (0,)), arrays)
        results = kernel(*plain)
    return jax.tree.map(lambda array: lax.pcast(array, axes, to="varying"), results) if axes else results
