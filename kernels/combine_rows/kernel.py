"""out[t] = sum over k of weights[t,k] * rows[place[t,k]] in float32 and its gradients, each row read and written once.

A place outside the rows, as -1, contributes zero. Products of offsets are 64 bits wide.
"""

import triton
import triton.language as tl


@triton.jit
def combine_rows_kernel(
    rows_ptr,  # [Q, H]
    weights_ptr,  # [T, K], not read unless WEIGHTED
    place_ptr,  # [T, K] int32
    out_ptr,  # [T, H]
    Q: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOAD_POLICY: tl.constexpr,
):
    chunks: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    t = (program // chunks) * TOKENS + tl.arange(0, TOKENS)
    c = (program % chunks) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (c < H)[None, :]
    first = t.to(tl.int64) * K
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for k in tl.static_range(K):  # ascending: the order of the sum is part of the contract
        place = tl.load(place_ptr + first + k, mask=t < T, other=-1)
        held = (place >= 0) & (place < Q)
        source = rows_ptr + place.to(tl.int64)[:, None] * H + c[None, :]
        row = tl.load(source, mask=held[:, None] & inside, other=0, eviction_policy=LOAD_POLICY).to(tl.float32)
        if WEIGHTED:
            # The weight of an assignment that is not held may be anything: it is not read.
            weight = tl.load(weights_ptr + first + k, mask=held, other=0).to(tl.float32)
            row = weight[:, None] * row
        total += row
    target = out_ptr + t.to(tl.int64)[:, None] * H + c[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(t < T)[:, None] & inside)


@triton.jit
def combine_rows_gradient_kernel(
    d_out_ptr,  # [T, H]
    rows_ptr,  # [Q, H]
    weights_ptr,  # [T, K]
    place_ptr,  # [T, K] int32
    assignment_ptr,  # [Q] int32: t*K + k, or -1
    d_rows_ptr,  # [Q, H]
    d_weights_ptr,  # [T, K] float32
    Q: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EMPTY_ROWS: tl.constexpr,
    EMPTY_COLUMNS: tl.constexpr,
    LOAD_POLICY: tl.constexpr,
):
    """The first ceil(T / TOKENS) programs go by token: d_out[t] comes from memory once, its K rows are read for the
    weights' gradient and their gradients written. The other programs write zeros to the rows that no token takes.
    """
    token_programs: tl.constexpr = (T + TOKENS - 1) // TOKENS
    program = tl.program_id(0)
    if program < token_programs:
        t = program * TOKENS + tl.arange(0, TOKENS)
        first = t.to(tl.int64) * K
        for k in range(K):
            place = tl.load(place_ptr + first + k, mask=t < T, other=-1)
            held = (place >= 0) & (place < Q)
            weight = tl.load(weights_ptr + first + k, mask=held, other=0).to(tl.float32)
            row_of = place.to(tl.int64)[:, None] * H
            products = tl.zeros((TOKENS, COLUMNS), tl.float32)
            for start in tl.static_range(0, H, COLUMNS):
                c = start + tl.arange(0, COLUMNS)
                taken = held[:, None] & (c < H)[None, :]
                d_out = tl.load(d_out_ptr + t.to(tl.int64)[:, None] * H + c[None, :], mask=taken, other=0)
                row = tl.load(rows_ptr + row_of + c[None, :], mask=taken, other=0, eviction_policy=LOAD_POLICY)
                d_row = weight[:, None] * d_out.to(tl.float32)
                tl.store(d_rows_ptr + row_of + c[None, :], d_row.to(d_rows_ptr.dtype.element_ty), mask=taken)
                products += d_out.to(tl.float32) * row.to(tl.float32)
            tl.store(d_weights_ptr + first + k, tl.sum(products, axis=1), mask=t < T)
    else:
        q = (program - token_programs) * EMPTY_ROWS + tl.arange(0, EMPTY_ROWS)
        empty = tl.load(assignment_ptr + q, mask=q < Q, other=0) < 0
        zeros = tl.zeros((EMPTY_ROWS, EMPTY_COLUMNS), d_rows_ptr.dtype.element_ty)
        for start in range(0, H, EMPTY_COLUMNS):
            c = start + tl.arange(0, EMPTY_COLUMNS)
            target = d_rows_ptr + q.to(tl.int64)[:, None] * H + c[None, :]
            tl.store(target, zeros, mask=empty[:, None] & (c < H)[None, :])
