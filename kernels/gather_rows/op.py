"""Rows by index near the speed of a copy, and moved with their derivatives: payload packing, compaction, expansion.

Letters: N input rows, M output rows, J places of one row, H width. An index outside 0 .. N-1, as -1, reads as zeros and
receives nothing, whatever the buffers contain. Needs a GPU; reference.py is the same in plain JAX.
"""

import jax

from .. import call, derivatives
from ..call import RowLaunch
from ..combine_rows.op import sum_rows
from ..spread_rows.op import spread_rows

# The first is within 1 % of the fastest on an H200 (benchmarks/kernels_h200_20261130.json) and is the default.
CANDIDATES = (
    RowLaunch(),
    RowLaunch(rows=4),
    RowLaunch(rows=16),
    RowLaunch(rows=16, warps=8),
    RowLaunch(rows=4, columns=512),
    RowLaunch(rows=16, columns=512),
    RowLaunch(rows=32, columns=256),
    RowLaunch(rows=4, columns=2048),
    RowLaunch(rows=8, columns=2048, warps=8),
    RowLaunch(rows=2, columns=4096),
    RowLaunch(load_policy="evict_first"),
    RowLaunch(store_cache=".cs"),
    RowLaunch(load_policy="evict_first", store_cache=".cs"),
    RowLaunch(rows=4, load_policy="evict_first", store_cache=".cs"),
    RowLaunch(rows=16, columns=512, store_cache=".cs"),
)


def gather_rows(rows_NH: jax.Array, index_M: jax.Array, launch: RowLaunch = CANDIDATES[0]) -> jax.Array:
    """rows_NH[index_M] (index int32), zeros where the index is outside 0 .. N-1.

    Elements of 2 or 4 bytes, H a multiple of 8; NotImplementedError otherwise. No derivative of its own; see
    `move_rows`.
    """
    call.check_rows(rows_NH)
    from .kernel import gather_rows_kernel

    (num_rows, width), num_out = rows_NH.shape, index_M.shape[0]
    return call.triton_call(
        rows_NH,
        index_M,
        kernel=gather_rows_kernel,
        out_shape=jax.ShapeDtypeStruct((num_out, width), rows_NH.dtype),
        programs=call.ceil_div(num_out, launch.rows) * call.ceil_div(width, launch.columns),
        N=num_rows,
        M=num_out,
        H=width,
        **launch.constants,
    )


def fill_rows(rows_NH: jax.Array, source_M: jax.Array, places_NJ: jax.Array) -> jax.Array:
    """gather_rows(rows_NH, source_M), whose inverse is places_NJ: by whichever kernel moves fewer bytes."""
    if places_NJ.shape[1] > 1 and source_M.shape[0] > rows_NH.shape[0]:
        return spread_rows(rows_NH, source_M, places_NJ)
    return gather_rows(rows_NH, source_M)


move_rows = derivatives.moving(fill_rows, gather_rows, sum_rows)
sum_moved_rows = derivatives.summing(sum_rows, fill_rows)
