"""Gradients of experts' matrices on Hopper: `weight_product` of ../grouped_matmul, faster where experts are small.

Letters: e experts, R rows of the buffer, K and N widths. Rows that nobody owns are never read. Needs a Hopper GPU or
Pallas's GPU interpreter. The plain reference is in ../grouped_matmul.

Does not do: other types than bfloat16, widths that the tiles do not divide.
"""

import functools

import jax
import jax.numpy as jnp

from .. import call
from ..gather_rows.op import gather_rows
from ..grouped_matmul.tiles import Groups
from ..grouped_matmul_mgpu.op import multiprocessors
from ..hopper import ALIGNED_ROWS, CLUSTER, STORE_COLUMNS, STORE_SLOTS, make_kernel
from .kernel import BLOCK_K, Launch, scratch, weight_gradient_kernel
from .plan import plan_steps

CANDIDATES = (Launch(), Launch(group=4), Launch(group=16))  # the first: default


def weight_product(
    rows_RK: jax.Array, d_out_RN: jax.Array, groups: Groups, dtype: jnp.dtype, launch: Launch = CANDIDATES[0]
) -> jax.Array:
    """[e,K,N] in bfloat16: the gradient of the weights, summed over exactly each expert's rows in float32.

    NotImplementedError for what the kernel does not take: other dtypes, K that is no multiple of 256, N no multiple of
    256 (with the default launch), R no multiple of 8, and devices other than Hopper.
    """
    out_type = jax.ShapeDtypeStruct((groups.sizes_e.shape[0], rows_RK.shape[1], d_out_RN.shape[1]), dtype)
    check(rows_RK, d_out_RN, out_type, launch)
    plan, edge_P = plan_steps(groups)
    arrays = (plan, rows_RK, d_out_RN, gather_rows(rows_RK, edge_P), gather_rows(d_out_RN, edge_P))
    out_eKN = call.traced_once(_make_kernel, out_type, launch, multiprocessors())(*arrays)
    # Inside shard_map: the kernel says nothing of the mesh axes over which its output varies.
    return call.vary_alike(out_eKN, arrays)[0]


def _make_kernel(out_type, launch, blocks):
    body = functools.partial(weight_gradient_kernel, launch=launch)
    return make_kernel(body, "weight_gradient", out_type, scratch(launch, out_type.dtype), blocks)


def check(rows_RK: jax.Array, d_out_RN: jax.Array, out_type: jax.ShapeDtypeStruct, launch: Launch) -> None:
    """Raises NotImplementedError for arrays that the kernel does not take, ValueError for a wrong call."""
    if rows_RK.shape[0] != d_out_RN.shape[0]:
        raise ValueError(f"{rows_RK.shape} and {d_out_RN.shape}: must have the same rows")
    if {str(x.dtype) for x in (rows_RK, d_out_RN, out_type)} != {"bfloat16"}:
        raise NotImplementedError(f"{rows_RK.dtype} times {d_out_RN.dtype} in {out_type.dtype}: all must be bfloat16")
    if launch.block_n % (STORE_SLOTS * STORE_COLUMNS):
        raise ValueError(f"block_n {launch.block_n}: must be a multiple of {STORE_SLOTS * STORE_COLUMNS}")
    for what, size, unit in (
        ("rows", rows_RK.shape[0], ALIGNED_ROWS),
        ("columns of the rows", rows_RK.shape[1], CLUSTER * BLOCK_K),
        ("columns of the gradients", d_out_RN.shape[1], launch.block_n),
    ):
        if size % unit:
            raise NotImplementedError(
                f"{rows_RK.shape} times {d_out_RN.shape}: {size} {what} must be a multiple of {unit}"
            )
