"""Rows grouped by expert times their expert's matrix on Hopper: `product` of ../grouped_matmul, faster.

Letters: e experts, R rows of the buffer, K and N widths. The contract on rows that nobody owns is that of
../grouped_matmul/op.py, but they may be read: they reach no row that has an owner. Needs a Hopper GPU or Pallas's GPU
interpreter. The plain reference is in ../grouped_matmul.

Does not do: other types than bfloat16, widths that the tiles do not divide, derivatives, weight gradients.
"""

import functools

import jax

from .. import call
from ..grouped_matmul.tiles import Groups
from ..hopper import ALIGNED_ROWS, CLUSTER, STORE_COLUMNS, STORE_SLOTS, make_kernel
from .kernel import Launch, grouped_kernel, scratch
from .plan import plan_tiles

CANDIDATES = (Launch(), Launch(group=8), Launch(group=32), Launch(group=4), Launch(group=64))  # the first: default


def product(
    rows_RK: jax.Array,
    weights: jax.Array,
    groups: Groups,
    *,
    transposed: bool = False,
    launch: Launch = CANDIDATES[0],
) -> jax.Array:
    """[R,N] in bfloat16: row r of expert i is rows_RK[r] @ weights[i], summed in float32. No derivative.

    Weights are [e,K,N], or where `transposed` [e,N,K], read as they lie. NotImplementedError for what the kernel does
    not take: other dtypes, K that is no multiple of 64, N no multiple of 512, R no multiple of 8 (with the default
    launch), and devices other than Hopper.
    """
    out_type = jax.ShapeDtypeStruct((rows_RK.shape[0], weights.shape[1 if transposed else 2]), rows_RK.dtype)
    check(rows_RK, weights, out_type, launch, transposed)
    arrays = (*plan_tiles(groups, rows_RK.shape[0]), rows_RK, weights)
    out_RN = call.traced_once(_make_kernel, out_type, launch, transposed, multiprocessors())(*arrays)
    # Inside shard_map: the kernel says nothing of the mesh axes over which its output varies.
    return call.vary_alike(out_RN, arrays)[0]


def _make_kernel(out_type, launch, transposed, blocks):
    body = functools.partial(grouped_kernel, launch=launch, transposed=transposed)
    return make_kernel(body, "grouped_matmul", out_type, scratch(launch, out_type.dtype, transposed=transposed), blocks)


def multiprocessors() -> int:
    """Of the GPU here. NotImplementedError where it is no Hopper."""
    device = jax.devices()[0]
    if device.platform == "gpu" and device.compute_capability != "9.0":
        raise NotImplementedError(
            f"{device.device_kind} of compute capability {device.compute_capability}: must be 9.0"
        )
    return call.multiprocessors()


def check(
    rows_RK: jax.Array, weights: jax.Array, out_type: jax.ShapeDtypeStruct, launch: Launch, transposed: bool
) -> None:
    """Raises NotImplementedError for arrays that the kernel does not take, ValueError for a wrong call."""
    (num_rows, inner), width = rows_RK.shape, out_type.shape[1]
    if weights.shape[2 if transposed else 1] != inner:
        raise ValueError(f"{rows_RK.shape} times {weights.shape}: the summed widths must be the same")
    if {str(rows_RK.dtype), str(weights.dtype)} != {"bfloat16"}:
        raise NotImplementedError(f"{rows_RK.dtype} times {weights.dtype}: both must be bfloat16")
    if launch.block_n % (STORE_SLOTS * STORE_COLUMNS):
        raise ValueError(f"block_n {launch.block_n}: must be a multiple of {STORE_SLOTS * STORE_COLUMNS}")
    for what, size, unit in (
        ("rows", num_rows, ALIGNED_ROWS),
        ("summed columns", inner, launch.block_k),
        ("output columns", width, CLUSTER * launch.block_n),
    ):
        if size % unit:
            raise NotImplementedError(
                f"{rows_RK.shape} times {weights.shape}: {size} {what} must be a multiple of {unit}"
            )
