"""silu(gate) * up of owned rows and its gradient, in float32; gate columns come first. Tiles as in ../grouped_matmul.

WEIGHTED: row r is multiplied by weights[r], and the gradient of that weight comes out as well.
"""

import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(
    hidden_ptr,  # [R, 2F]
    weights_ptr,  # [R] float32, not read unless WEIGHTED
    tiles_ptr,  # [TILES, 3] int32: expert, first row, rows (0: not used)
    middle_ptr,  # [R, F]
    F: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    chunks: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // chunks
    num_rows = tl.load(tiles_ptr + tile * 3 + 2)
    if num_rows == 0:
        return
    first_row = tl.load(tiles_ptr + tile * 3 + 1).to(tl.int64)
    m = tl.arange(0, ROWS)
    f = (tl.program_id(0) % chunks) * COLUMNS + tl.arange(0, COLUMNS)
    held = (m < num_rows)[:, None] & (f < F)[None, :]
    gate_at = hidden_ptr + first_row * (2 * F) + m[:, None] * (2 * F) + f[None, :]
    gate = tl.load(gate_at, mask=held, other=0.0).to(tl.float32)
    up = tl.load(gate_at + F, mask=held, other=0.0).to(tl.float32)
    middle = gate / (1 + tl.exp(-gate)) * up
    if WEIGHTED:
        middle = tl.load(weights_ptr + first_row + m, mask=m < num_rows, other=0.0)[:, None] * middle
    middle_at = middle_ptr + first_row * F + m[:, None] * F + f[None, :]
    tl.store(middle_at, middle.to(middle_ptr.dtype.element_ty), mask=held)


@triton.jit
def store_gradient(d_middle, hidden_at, d_hidden_at, m, f, num_rows, F: tl.constexpr):
    """Rows m and columns f of d_hidden, from d_middle there; rows are counted from where the pointers are.

    Returns silu(gate) * up there.
    """
    held = (m < num_rows)[:, None] & (f < F)[None, :]
    offsets = m[:, None] * (2 * F) + f[None, :]
    gate = tl.load(hidden_at + offsets, mask=held, other=0.0).to(tl.float32)
    up = tl.load(hidden_at + F + offsets, mask=held, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    d_up = d_middle * gate * sigmoid
    tl.store(d_hidden_at + F + offsets, d_up.to(d_hidden_at.dtype.element_ty), mask=held)
    d_gate = d_middle * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(d_hidden_at + offsets, d_gate.to(d_hidden_at.dtype.element_ty), mask=held)
    return gate * sigmoid * up


@triton.jit
def swiglu_gradient_kernel(
    hidden_ptr,  # [R, 2F]
    d_middle_ptr,  # [R, F]
    weights_ptr,  # [R] float32, not read unless WEIGHTED
    tiles_ptr,  # [TILES, 3] int32
    d_hidden_ptr,  # [R, 2F]
    d_weights_ptr,  # [R] float32, not written unless WEIGHTED
    F: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program walks over all columns of its rows: the gradient of a weight is a sum over them."""
    tile = tl.program_id(0)
    num_rows = tl.load(tiles_ptr + tile * 3 + 2)
    if num_rows == 0:
        return
    first_row = tl.load(tiles_ptr + tile * 3 + 1).to(tl.int64)
    m = tl.arange(0, ROWS)
    weight = tl.zeros((ROWS,), tl.float32)
    if WEIGHTED:
        weight = tl.load(weights_ptr + first_row + m, mask=m < num_rows, other=0.0)
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, F, COLUMNS):
        f = begin + tl.arange(0, COLUMNS)
        held = (m < num_rows)[:, None] & (f < F)[None, :]
        d_middle_at = d_middle_ptr + first_row * F + m[:, None] * F + f[None, :]
        d_out = tl.load(d_middle_at, mask=held, other=0.0).to(tl.float32)
        d_middle = d_out
        if WEIGHTED:
            d_middle = weight[:, None] * d_out
        start = first_row * (2 * F)
        middle = store_gradient(d_middle, hidden_ptr + start, d_hidden_ptr + start, m, f, num_rows, F)
        if WEIGHTED:
            products += d_out * middle
    if WEIGHTED:
        tl.store(d_weights_ptr + first_row + m, tl.sum(products, axis=1), mask=m < num_rows)
