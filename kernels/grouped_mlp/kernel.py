"""SwiGLU inside the grouped products: gate and up of a tile in one program, and their gradients where d_middle appears.

Programs, tiles and lanes as in ../grouped_matmul/kernel.py, the only import besides triton. The gate's F columns come
first. What is between the two products is computed in float32 from the sums, before any rounding.
"""

import triton
import triton.language as tl

from ..grouped_matmul.kernel import grouped_order


@triton.jit
def grouped_gate_up_kernel(
    rows_ptr,  # [R, K]
    weights_ptr,  # [e, K, 2F]
    tiles_ptr,  # [TILES, 3] int32: expert, first row, rows (0: not used)
    hidden_ptr,  # [R, 2F]: gate and up, for the gradient
    middle_ptr,  # [R, F]: silu(gate) * up
    TILES: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # of F; the program computes as many columns of gate and of up
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    columns: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    tile, column = grouped_order(tl.program_id(0), TILES, columns, GROUP)
    expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    first_row = tl.load(tiles_ptr + tile * 3 + 1).to(tl.int64)
    num_rows = tl.load(tiles_ptr + tile * 3 + 2)
    if num_rows == 0:
        return
    m = tl.arange(0, BLOCK_M)
    f = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_read = tl.where(m < num_rows, m, 0)
    f_read = f if F % BLOCK_N == 0 else tl.where(f < F, f, 0)
    rows_at = rows_ptr + first_row * K + m_read[:, None] * K + k[None, :]
    gate_at = weights_ptr + expert * (2 * K * F) + k[:, None] * (2 * F) + f_read[None, :]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            rows = tl.load(rows_at)
            w_gate = tl.load(gate_at)
            w_up = tl.load(gate_at + F)
        else:
            rows = tl.load(rows_at, mask=(k < K - start)[None, :], other=0.0)
            w_gate = tl.load(gate_at, mask=(k < K - start)[:, None], other=0.0)
            w_up = tl.load(gate_at + F, mask=(k < K - start)[:, None], other=0.0)
        gate = tl.dot(rows, w_gate, gate, input_precision=PRECISION)
        up = tl.dot(rows, w_up, up, input_precision=PRECISION)
        rows_at += BLOCK_K
        gate_at += BLOCK_K * 2 * F
    written = (m < num_rows)[:, None] & (f < F)[None, :]
    hidden_at = hidden_ptr + first_row * (2 * F) + m[:, None] * (2 * F) + f[None, :]
    tl.store(hidden_at, gate.to(hidden_ptr.dtype.element_ty), mask=written)
    tl.store(hidden_at + F, up.to(hidden_ptr.dtype.element_ty), mask=written)
    middle = gate / (1 + tl.exp(-gate)) * up
    middle_at = middle_ptr + first_row * F + m[:, None] * F + f[None, :]
    tl.store(middle_at, middle.to(middle_ptr.dtype.element_ty), mask=written)


@triton.jit
def store_gate_up_gradient(d_middle, hidden_at, d_hidden_at, m, f, num_rows, F: tl.constexpr):
    """Rows m and columns f of d_hidden, from d_middle there; rows are counted from where the pointers are."""
    written = (m < num_rows)[:, None] & (f < F)[None, :]
    offsets = m[:, None] * (2 * F) + f[None, :]
    gate = tl.load(hidden_at + offsets, mask=written, other=0.0).to(tl.float32)
    up = tl.load(hidden_at + F + offsets, mask=written, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    d_up = d_middle * gate * sigmoid
    tl.store(d_hidden_at + F + offsets, d_up.to(d_hidden_at.dtype.element_ty), mask=written)
    d_gate = d_middle * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(d_hidden_at + offsets, d_gate.to(d_hidden_at.dtype.element_ty), mask=written)


@triton.jit
def grouped_gate_up_gradient_kernel(
    d_out_ptr,  # [R, K]
    weights_ptr,  # [e, F, K]: the down projection, read transposed
    hidden_ptr,  # [R, 2F]
    tiles_ptr,  # [TILES, 3] int32
    d_hidden_ptr,  # [R, 2F]
    TILES: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # of F
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    columns: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    tile, column = grouped_order(tl.program_id(0), TILES, columns, GROUP)
    expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    first_row = tl.load(tiles_ptr + tile * 3 + 1).to(tl.int64)
    num_rows = tl.load(tiles_ptr + tile * 3 + 2)
    if num_rows == 0:
        return
    m = tl.arange(0, BLOCK_M)
    f = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_read = tl.where(m < num_rows, m, 0)
    f_read = f if F % BLOCK_N == 0 else tl.where(f < F, f, 0)
    d_out_at = d_out_ptr + first_row * K + m_read[:, None] * K + k[None, :]
    weights_at = weights_ptr + expert * (F * K) + f_read[None, :] * K + k[:, None]
    d_middle = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            d_out = tl.load(d_out_at)
            weights = tl.load(weights_at)
        else:
            d_out = tl.load(d_out_at, mask=(k < K - start)[None, :], other=0.0)
            weights = tl.load(weights_at, mask=(k < K - start)[:, None], other=0.0)
        d_middle = tl.dot(d_out, weights, d_middle, input_precision=PRECISION)
        d_out_at += BLOCK_K
        weights_at += BLOCK_K
    # In two halves of the columns: a whole tile of gate, up and their gradients does not fit the registers.
    halves = d_middle.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1)
    left, right = halves.split()
    f_half = column * BLOCK_N + tl.arange(0, BLOCK_N // 2)
    hidden_at = hidden_ptr + first_row * (2 * F)
    d_hidden_at = d_hidden_ptr + first_row * (2 * F)
    store_gate_up_gradient(left, hidden_at, d_hidden_at, m, f_half, num_rows, F)
    store_gate_up_gradient(right, hidden_at, d_hidden_at, m, f_half + BLOCK_N // 2, num_rows, F)
