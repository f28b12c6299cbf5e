"""Rows grouped by expert times their expert's matrix, as it is or transposed, and the gradient of these matrices.

Letters: e experts, R rows of the buffer, K and N widths. `Groups` says which rows are whose: contiguous or at a fixed
distance, with true sizes either way. Contract on rows that nobody owns: they are never read, and in outputs and row
gradients they are not written and may hold anything, NaN included; whoever reads the result takes owned rows only.
Weight gradients are written whole, zeros for an expert without rows. Needs a GPU; reference.py is plain JAX.

Does not do: derivatives and the SwiGLU between two products (../grouped_mlp does), persistent programs, bulk tensor
copies (jax-triton 0.3.1 does not hand on the scratch memory that their descriptors need).
"""

import dataclasses

import jax
import jax.numpy as jnp

from .. import call
from .tiles import Groups, num_tiles, plan_tiles


@dataclasses.dataclass(frozen=True)
class Launch:
    """A program's tile, block_m x block_n of output, block_k summed over at a time."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group: int = 8
    warps: int = 8
    stages: int = 3


# The first was the fastest on an H200 (benchmarks/kernels_h200_20261130.json) and is the default.
CANDIDATES = (
    Launch(group=16),
    Launch(),
    Launch(stages=4),
    Launch(group=4),
    Launch(block_m=256, block_n=128),
    Launch(block_m=256, block_n=128, stages=4),
    Launch(block_n=128, warps=4),
    Launch(block_n=128, warps=4, stages=4),
    Launch(block_n=128, warps=8),
    Launch(block_n=128, warps=8, stages=4),
    Launch(block_n=128, block_k=128, warps=8),
    Launch(block_m=64, block_n=256, warps=4),
    Launch(block_m=64, block_n=256, warps=4, stages=4),
)


def product(
    rows_RK: jax.Array,
    weights: jax.Array,
    groups: Groups,
    *,
    transposed: bool = False,
    launch: Launch = CANDIDATES[0],
) -> jax.Array:
    """Row r of expert i becomes rows_RK[r] @ weights[i], summed in float32, in the dtype of the rows.

    Weights are [e,K,N], or where `transposed` [e,N,K], read as they lie. Rows and weights are bfloat16, float16 or
    float32 (the last multiplied exactly, not in TF32), of one dtype, widths multiples of 8; NotImplementedError
    otherwise.
    """
    check(rows_RK, weights)
    from .kernel import grouped_matmul_kernel

    num_rows, inner = rows_RK.shape
    experts, *sides = weights.shape
    width = sides[0] if transposed else sides[1]
    return call.triton_call(
        rows_RK,
        weights,
        plan_tiles(groups, num_rows, launch.block_m),
        kernel=grouped_matmul_kernel,
        out_shape=jax.ShapeDtypeStruct((num_rows, width), rows_RK.dtype),
        programs=num_tiles(num_rows, experts, launch.block_m) * call.ceil_div(width, launch.block_n),
        num_warps=launch.warps,
        num_stages=launch.stages,
        TILES=num_tiles(num_rows, experts, launch.block_m),
        K=inner,
        N=width,
        STRIDE_E=inner * width,
        STRIDE_K=1 if transposed else width,
        STRIDE_N=inner if transposed else 1,
        **block_constants(launch, rows_RK.dtype),
    )


def weight_product(
    rows_RK: jax.Array, d_out_RN: jax.Array, groups: Groups, dtype: jnp.dtype, launch: Launch = CANDIDATES[0]
) -> jax.Array:
    """[e,K,N] in `dtype`: the gradient of the weights, summed over exactly each expert's rows in float32."""
    check(rows_RK, d_out_RN)
    from .kernel import grouped_weight_gradient_kernel

    inner, width, experts = rows_RK.shape[1], d_out_RN.shape[1], groups.sizes_e.shape[0]
    return call.triton_call(
        rows_RK,
        d_out_RN,
        *groups,
        kernel=grouped_weight_gradient_kernel,
        out_shape=jax.ShapeDtypeStruct((experts, inner, width), dtype),
        programs=experts * call.ceil_div(inner, launch.block_m) * call.ceil_div(width, launch.block_n),
        num_warps=launch.warps,
        num_stages=launch.stages,
        K=inner,
        N=width,
        **block_constants(launch, rows_RK.dtype),
    )


def block_constants(launch: Launch, dtype: jnp.dtype) -> dict[str, int | str]:
    """What every grouped kernel is told of its launch."""
    return {
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "BLOCK_K": launch.block_k,
        "GROUP": launch.group,
        "PRECISION": "ieee" if dtype == jnp.float32 else "tf32",  # only float32 operands look at it
    }


def check(left: jax.Array, right: jax.Array) -> None:
    """Raises NotImplementedError for dtypes and widths that the kernels do not take."""
    dtypes = {str(left.dtype), str(right.dtype)}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16", "float32"}:
        raise NotImplementedError(f"{left.dtype} times {right.dtype}: both must be bfloat16, float16 or float32")
    if any(width % 8 for width in (left.shape[1], *right.shape[1:])):
        raise NotImplementedError(f"{left.shape} times {right.shape}: widths must be multiples of 8")
