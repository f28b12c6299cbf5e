"""Matrix products of rows grouped by expert: rows times their expert's matrix, and each expert's weight gradient.

One program computes one tile of output. Which rows a tile of rows holds is computed on the device beforehand
(tiles.py); a program whose tile is not used ends at once. Programs run down GROUP tiles of rows before they take the
next column, so that what they share stays in L2. Accumulation is in float32. Offsets of rows and experts are 64 bits
wide. Row lanes past a tile's last row repeat its first row instead of being masked: they cost no predicates and read
nothing that no expert owns.
"""

import triton
import triton.language as tl


@triton.jit
def grouped_order(program, height: tl.constexpr, columns: tl.constexpr, GROUP: tl.constexpr):
    """(row tile, column tile) of a program: column by column within GROUP row tiles."""
    first = program // (GROUP * columns) * GROUP
    rows = min(height - first, GROUP)
    inside = program % (GROUP * columns)
    return first + inside % rows, inside // rows


@triton.jit
def grouped_matmul_kernel(
    rows_ptr,  # [R, K]
    weights_ptr,  # [e, K, N] by strides
    tiles_ptr,  # [TILES, 3] int32: expert, first row, rows (0: not used)
    out_ptr,  # [R, N]
    TILES: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    STRIDE_E: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows that no tile holds are not written."""
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile, column = grouped_order(tl.program_id(0), TILES, columns, GROUP)
    expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    first_row = tl.load(tiles_ptr + tile * 3 + 1).to(tl.int64)
    num_rows = tl.load(tiles_ptr + tile * 3 + 2)
    if num_rows == 0:
        return
    m = tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_read = tl.where(m < num_rows, m, 0)
    n_read = n if N % BLOCK_N == 0 else tl.where(n < N, n, 0)
    rows_at = rows_ptr + first_row * K + m_read[:, None] * K + k[None, :]
    weights_at = weights_ptr + expert * STRIDE_E + k[:, None] * STRIDE_K + n_read[None, :] * STRIDE_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            rows = tl.load(rows_at)
            weights = tl.load(weights_at)
        else:
            rows = tl.load(rows_at, mask=(k < K - start)[None, :], other=0.0)
            weights = tl.load(weights_at, mask=(k < K - start)[:, None], other=0.0)
        total = tl.dot(rows, weights, total, input_precision=PRECISION)
        rows_at += BLOCK_K
        weights_at += BLOCK_K * STRIDE_K
    out_at = out_ptr + first_row * N + m[:, None] * N + n[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < N)[None, :])


@triton.jit
def grouped_weight_gradient_kernel(
    rows_ptr,  # [R, K]
    d_out_ptr,  # [R, N]
    starts_ptr,  # [e] int32
    sizes_ptr,  # [e] int32
    d_weights_ptr,  # [e, K, N]
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,  # of K
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # rows summed over at a time
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums over exactly an expert's rows, the last of them under a mask; an expert without rows gets zeros."""
    height: tl.constexpr = (K + BLOCK_M - 1) // BLOCK_M
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    expert = program // (height * columns)
    tile, column = grouped_order(program % (height * columns), height, columns, GROUP)
    first_row = tl.load(starts_ptr + expert).to(tl.int64)
    num_rows = tl.load(sizes_ptr + expert)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_K)
    m_read = m if K % BLOCK_M == 0 else tl.where(m < K, m, 0)
    n_read = n if N % BLOCK_N == 0 else tl.where(n < N, n, 0)
    rows_at = rows_ptr + first_row * K + r[None, :] * K + m_read[:, None]
    d_out_at = d_out_ptr + first_row * N + r[:, None] * N + n_read[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, num_rows, BLOCK_K):
        rows = tl.load(rows_at, mask=(r < num_rows - start)[None, :], other=0.0)
        d_out = tl.load(d_out_at, mask=(r < num_rows - start)[:, None], other=0.0)
        total = tl.dot(rows, d_out, total, input_precision=PRECISION)
        rows_at += BLOCK_K * K
        d_out_at += BLOCK_K * N
    out_at = d_weights_ptr + expert.to(tl.int64) * (K * N) + m[:, None] * N + n[None, :]
    tl.store(out_at, total.to(d_weights_ptr.dtype.element_ty), mask=(m < K)[:, None] & (n < N)[None, :])
