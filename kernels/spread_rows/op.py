"""Rows to all their places, each read once: `gather_rows` where rows have several places and both maps are known.

Letters: N input rows, M output rows, J places of one row, H width. Needs a GPU; the same in plain JAX is `gather_rows`
of ../gather_rows/reference.py.
"""

import jax

from .. import call
from ..call import RowLaunch

EMPTY_ROWS, EMPTY_COLUMNS = 64, 128  # tile of the programs that write zeros


# The first was the fastest on an H200 (benchmarks/spread_h200_20261130.json) and is the default.
CANDIDATES = (
    RowLaunch(warps=8),
    RowLaunch(rows=1),
    RowLaunch(rows=2),
    RowLaunch(rows=4),
    RowLaunch(),
    RowLaunch(rows=4, columns=512),
    RowLaunch(rows=16, columns=256),
    RowLaunch(rows=2, columns=2048),
    RowLaunch(rows=4, load_policy="evict_first"),
    RowLaunch(rows=4, store_cache=".cs"),
    RowLaunch(rows=4, load_policy="evict_first", store_cache=".cs"),
)


def spread_rows(
    rows_NH: jax.Array, source_M: jax.Array, places_NJ: jax.Array, launch: RowLaunch = CANDIDATES[0]
) -> jax.Array:
    """[M,H]: row n at each of its places_NJ[n], zeros where source_M is outside 0 .. N-1.

    Both maps are int32, -1 for none, and inverse to each other: m is among places_NJ[n] where source_M[m] = n, else
    nowhere. Elements of 2 or 4 bytes, H a multiple of 8; NotImplementedError otherwise. No derivative of its own; see
    `move_rows` of ../gather_rows.
    """
    call.check_rows(rows_NH)
    from .kernel import spread_rows_kernel

    (num_rows, width), (num_out,) = rows_NH.shape, source_M.shape
    row_programs = call.ceil_div(num_rows, launch.rows) * call.ceil_div(width, launch.columns)
    return call.triton_call(
        rows_NH,
        source_M,
        places_NJ,
        kernel=spread_rows_kernel,
        out_shape=jax.ShapeDtypeStruct((num_out, width), rows_NH.dtype),
        programs=row_programs + call.ceil_div(num_out, EMPTY_ROWS),
        N=num_rows,
        M=num_out,
        J=places_NJ.shape[1],
        H=width,
        EMPTY_ROWS=EMPTY_ROWS,
        EMPTY_COLUMNS=EMPTY_COLUMNS,
        **launch.constants,
    )
