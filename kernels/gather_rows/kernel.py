"""out[m] = rows[index[m]], zeros where the index is outside the rows.

A program moves ROWS x COLUMNS elements: it reads its indices once and has all its loads in flight before the first
store. The compiler makes 16-byte accesses because COLUMNS and H are multiples of 8 elements. Programs that share rows
are neighbours. Offsets are 64 bits wide: buffers may hold more than 2^31 elements.
"""

import triton
import triton.language as tl


@triton.jit
def gather_rows_kernel(
    rows_ptr,  # [N, H]
    index_ptr,  # [M] int32
    out_ptr,  # [M, H]
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOAD_POLICY: tl.constexpr,  # eviction policy of the rows, "" for the default
    STORE_CACHE: tl.constexpr,  # cache modifier of the output, "" for the default
):
    chunks: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    m = (program // chunks) * ROWS + tl.arange(0, ROWS)
    c = (program % chunks) * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.load(index_ptr + m, mask=m < M, other=-1)
    held = (index >= 0) & (index < N)
    inside = (c < H)[None, :]
    source = rows_ptr + index.to(tl.int64)[:, None] * H + c[None, :]
    values = tl.load(source, mask=held[:, None] & inside, other=0, eviction_policy=LOAD_POLICY)
    target = out_ptr + m.to(tl.int64)[:, None] * H + c[None, :]
    tl.store(target, values, mask=(m < M)[:, None] & inside, cache_modifier=STORE_CACHE)
