"""What the persistent Hopper kernels of this folder have in common: clusters of two blocks, each of two warpgroups that
multiply and one that loads, a ring of slots between them, and results that leave through shared memory.
"""

from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

CLUSTER = 2  # blocks
MULTIPLIERS = 2  # warpgroups of a block that multiply
UNIT = 64  # rows of one wgmma instruction
ALIGNED_ROWS = 8  # of swizzled memory: a bulk copy begins at a multiple of them
SWIZZLE_BYTES = 128
STORE_COLUMNS = 64
STORE_SLOTS = 2
LOADER_REGISTERS, MULTIPLIER_REGISTERS = 40, 232  # 40 + 2 * 232 of the 512 that 128 threads have on a multiprocessor


def tiled() -> tuple[Any, ...]:
    """How operands of wgmma lie in shared memory, 2-byte elements."""
    return plgpu.TilingTransform((ALIGNED_ROWS, SWIZZLE_BYTES // 2)), plgpu.SwizzleTransform(SWIZZLE_BYTES)


def ring_barriers(stages: int) -> dict[str, Any]:
    """A slot is loaded by a copy for each multiplier and one that the cluster shares, and released by all of these."""
    return {
        "loaded": plgpu.Barrier(num_arrivals=MULTIPLIERS + 1, num_barriers=stages),
        "released": plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=MULTIPLIERS, num_barriers=stages),
    }


def make_kernel(
    body: Callable[..., None], name: str, out_type: Any, scratch_types: dict[str, Any], blocks: int
) -> Callable[..., Any]:
    """body as a kernel of `blocks` blocks."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(blocks // CLUSTER,),
        grid_names=("clusters",),
        cluster=(CLUSTER,),
        cluster_names=("cluster",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
    )
