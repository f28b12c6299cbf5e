"""out[places[n, j]] = rows[n] for every j, zeros where source[m] is outside the rows.

A gather of the same rows reads one as often as it is held, and where its places lie far apart, as an expert's rows do,
mostly from memory. Here the first programs go by row: each comes from memory once. The others look for output rows
that hold none, a few of many, and write zeros. Offsets are 64 bits wide.
"""

import triton
import triton.language as tl


@triton.jit
def spread_rows_kernel(
    rows_ptr,  # [N, H]
    source_ptr,  # [M] int32
    places_ptr,  # [N, J] int32
    out_ptr,  # [M, H]
    N: tl.constexpr,
    M: tl.constexpr,
    J: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EMPTY_ROWS: tl.constexpr,
    EMPTY_COLUMNS: tl.constexpr,
    LOAD_POLICY: tl.constexpr,  # eviction policy of the rows, "" for the default
    STORE_CACHE: tl.constexpr,  # cache modifier of the output, "" for the default
):
    chunks: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    row_programs: tl.constexpr = (N + ROWS - 1) // ROWS * chunks
    program = tl.program_id(0)
    if program < row_programs:
        n = (program // chunks) * ROWS + tl.arange(0, ROWS)
        c = (program % chunks) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (c < H)[None, :]
        rows = rows_ptr + n.to(tl.int64)[:, None] * H + c[None, :]
        values = tl.load(rows, mask=(n < N)[:, None] & inside, other=0, eviction_policy=LOAD_POLICY)
        for j in tl.static_range(J):
            place = tl.load(places_ptr + n.to(tl.int64) * J + j, mask=n < N, other=-1)
            held = (place >= 0) & (place < M)
            target = out_ptr + place.to(tl.int64)[:, None] * H + c[None, :]
            tl.store(target, values, mask=held[:, None] & inside, cache_modifier=STORE_CACHE)
    else:
        m = (program - row_programs) * EMPTY_ROWS + tl.arange(0, EMPTY_ROWS)
        source = tl.load(source_ptr + m, mask=m < M, other=0)
        empty = (source < 0) | (source >= N)
        if tl.max(empty.to(tl.int32), axis=0) > 0:
            zeros = tl.zeros((EMPTY_ROWS, EMPTY_COLUMNS), out_ptr.dtype.element_ty)
            for start in range(0, H, EMPTY_COLUMNS):
                c = start + tl.arange(0, EMPTY_COLUMNS)
                target = out_ptr + m.to(tl.int64)[:, None] * H + c[None, :]
                tl.store(target, zeros, mask=empty[:, None] & (c < H)[None, :])
