"""Rows by index into e4m3 with a float32 scale each, and back; every element is read and written once.

A program of `quantize_rows_kernel` holds ROWS whole rows in registers: it finds the largest absolute value of each and
rounds from there. Offsets are 64 bits wide.
"""

import triton
import triton.language as tl


@triton.jit
def quantize_rows_kernel(
    rows_ptr,  # [N, H]
    index_ptr,  # [M] int32
    out_ptr,  # [M, H] e4m3
    scale_ptr,  # [M] float32
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # at least H
    LARGEST: tl.constexpr,  # of e4m3
    LEAST_SCALE: tl.constexpr,
):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    index = tl.load(index_ptr + m, mask=m < M, other=-1)
    held = (index >= 0) & (index < N)
    inside = (c < H)[None, :]
    source = rows_ptr + index.to(tl.int64)[:, None] * H + c[None, :]
    values = tl.load(source, mask=held[:, None] & inside, other=0).to(tl.float32)
    sizes = tl.abs(values)
    infinity = float("inf")
    largest = tl.max(tl.where(sizes < infinity, sizes, infinity), axis=1)  # NaN counts as infinite
    scale = tl.maximum(largest * (1 / LARGEST), LEAST_SCALE)
    scale = tl.where(largest < infinity, tl.where(largest > 0, scale, 1.0), float("nan"))
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    target = out_ptr + m.to(tl.int64)[:, None] * H + c[None, :]
    tl.store(target, (values * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & inside)
    tl.store(scale_ptr + m, scale, mask=m < M)


@triton.jit
def restore_rows_kernel(
    bytes_ptr,  # [N, H] e4m3
    index_ptr,  # [M] int32
    scale_ptr,  # [M] float32, not read where the index is outside the rows
    out_ptr,  # [M, H]
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    chunks: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    m = (program // chunks) * ROWS + tl.arange(0, ROWS)
    c = (program % chunks) * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.load(index_ptr + m, mask=m < M, other=-1)
    held = (index >= 0) & (index < N)
    inside = (c < H)[None, :]
    scale = tl.load(scale_ptr + m, mask=held, other=0)
    source = bytes_ptr + index.to(tl.int64)[:, None] * H + c[None, :]
    values = tl.load(source, mask=held[:, None] & inside, other=0.0).to(tl.float32) * scale[:, None]
    target = out_ptr + m.to(tl.int64)[:, None] * H + c[None, :]
    tl.store(target, values.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & inside)
