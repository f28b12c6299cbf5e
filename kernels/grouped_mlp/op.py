"""The routed experts on grouped rows: three products and SwiGLU, forward and backward.

Letters: e experts, R rows of the buffer (of each expert in `capacity_mlp`), H width, F expert hidden width. Rows that
nobody owns are as in ../grouped_matmul/op.py: they reach no owned row, and in outputs and row gradients they may be
anything. Needs a GPU; reference.py is plain JAX. Kept for the gradient: rows, gate and up [R,2F], and silu(gate) * up
[R,F].

Weight gradients and SwiGLU look at owned rows only. So do products of rows. Both are those of ../weight_gradient_mgpu
and ../grouped_matmul_mgpu, or of ../grouped_matmul where these do not take them. With little padding XLA's batched
product of all rows is faster (`capacity_mlp`): it reads and writes rows that nobody owns, where hidden, middle and
gradients may hold anything, NaN included; each row of a product comes from one row, so that stays where it is.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .. import call
from ..grouped_matmul import op as matmul
from ..grouped_matmul.op import Launch
from ..grouped_matmul.tiles import Groups, capacity_groups
from ..swiglu.op import swiglu, swiglu_gradient

# What products of an expert's owned rows lose against XLA's batched ones, in rows: a share of those that it owns, and
# part of its last tile. From benchmarks/experts_h200_20261130.json, forward and backward: both ways take as long with
# 283 rows of padding for 8,192 rows of width 3072, 288 for 8,192 of width 2048, and 111 for 1,024 of width 3072.
LOST_SHARE, LOST_ROWS = 0.025, 85


@dataclasses.dataclass(frozen=True)
class Methods:
    """How the products are computed."""

    batched: bool = False  # rows, owned or not, by XLA; only where experts' rows lie at a fixed distance
    warp_specialized: bool = True  # otherwise, and weight gradients, by kernels for Hopper where these take them
    rows: Launch = matmul.CANDIDATES[0]  # otherwise
    weights: Launch = matmul.CANDIDATES[0]


def capacity_mlp(
    rows_eRH: jax.Array,
    w_gate_up_eH2F: jax.Array,
    w_down_eFH: jax.Array,
    sizes_e: jax.Array,
    expected_rows: float,
    row_weights_eR: jax.Array | None = None,
    methods: Methods | None = None,
) -> jax.Array:
    """`grouped_mlp` where expert i owns the first sizes_e[i] (int32) of its R rows; [e,R,H].

    expected_rows is the mean of sizes_e as far as it is known beforehand: it decides how rows are multiplied, unless
    `methods` says it.
    """
    num_experts, num_rows, width = rows_eRH.shape
    methods = methods or Methods(batched=num_rows - expected_rows <= LOST_SHARE * expected_rows + LOST_ROWS)
    groups = capacity_groups(sizes_e, num_rows)
    row_weights_R = None if row_weights_eR is None else row_weights_eR.reshape(-1)
    rows_RH = rows_eRH.reshape(-1, width)
    return grouped_mlp(rows_RH, w_gate_up_eH2F, w_down_eFH, groups, row_weights_R, methods).reshape(rows_eRH.shape)


def grouped_mlp(
    rows_RH: jax.Array,
    w_gate_up_eH2F: jax.Array,
    w_down_eFH: jax.Array,
    groups: Groups,
    row_weights_R: jax.Array | None = None,
    methods: Methods = Methods(),
) -> jax.Array:
    """down(silu(gate(x)) * up(x)) of each row by its expert, in the dtype of the rows; gate columns come first.

    row_weights_R, float32, multiply the results (before the last product); those of rows that nobody owns are not
    read. Sums and SwiGLU are float32. Dtypes and widths as ../grouped_matmul takes them; NotImplementedError otherwise.
    For remat policies the result of the first product is named "expert_hidden".
    """
    matmul.check(rows_RH, w_gate_up_eH2F)
    return _grouped_mlp(*call.vary_alike(rows_RH, w_gate_up_eH2F, w_down_eFH, groups, row_weights_R), methods)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _grouped_mlp(rows_RH, w_gate_up_eH2F, w_down_eFH, groups, row_weights_R, methods):
    return _forward(rows_RH, w_gate_up_eH2F, w_down_eFH, groups, row_weights_R, methods)[0]


def _forward(rows_RH, w_gate_up_eH2F, w_down_eFH, groups, row_weights_R, methods):
    hidden_R2F = checkpoint_name(_product(rows_RH, w_gate_up_eH2F, groups, methods), "expert_hidden")
    middle_RF = swiglu(hidden_R2F, groups, row_weights_R)
    out_RH = _product(middle_RF, w_down_eFH, groups, methods)
    return out_RH, (rows_RH, w_gate_up_eH2F, w_down_eFH, groups, row_weights_R, hidden_R2F, middle_RF)


def _backward(methods, residuals, d_out_RH):
    rows_RH, w_gate_up_eH2F, w_down_eFH, groups, row_weights_R, hidden_R2F, middle_RF = residuals
    d_middle_RF = _product(d_out_RH, w_down_eFH, groups, methods, transposed=True)
    d_hidden_R2F, d_row_weights_R = swiglu_gradient(hidden_R2F, d_middle_RF, groups, row_weights_R)
    d_rows_RH = _product(d_hidden_R2F, w_gate_up_eH2F, groups, methods, transposed=True)
    d_gate_up = _weight_product(rows_RH, d_hidden_R2F, groups, w_gate_up_eH2F.dtype, methods)
    d_down = _weight_product(middle_RF, d_out_RH, groups, w_down_eFH.dtype, methods)
    return d_rows_RH, d_gate_up, d_down, None, d_row_weights_R


_grouped_mlp.defvjp(_forward, _backward)


def _product(rows, weights, groups: Groups, methods: Methods, *, transposed: bool = False) -> jax.Array:
    if methods.batched:
        rows_eRK = rows.reshape(weights.shape[0], -1, rows.shape[1])
        product_eRN = jnp.einsum("erk,enk->ern" if transposed else "erk,ekn->ern", rows_eRK, weights)
        return product_eRN.reshape(rows.shape[0], -1)
    by_triton = functools.partial(matmul.product, transposed=transposed, launch=methods.rows)
    if not methods.warp_specialized:
        return by_triton(rows, weights, groups)
    from ..grouped_matmul_mgpu import op as matmul_mgpu

    on_hopper = functools.partial(matmul_mgpu.product, transposed=transposed)
    return call.unless_refused("products of rows by Triton's kernel", on_hopper, by_triton, rows, weights, groups)


def _weight_product(rows, d_out, groups: Groups, dtype: jnp.dtype, methods: Methods) -> jax.Array:
    by_triton = functools.partial(matmul.weight_product, launch=methods.weights)
    if not methods.warp_specialized:
        return by_triton(rows, d_out, groups, dtype)
    from ..weight_gradient_mgpu import op as gradient_mgpu

    on_hopper = gradient_mgpu.weight_product
    instead = "gradients of weights by Triton's kernel"
    return call.unless_refused(instead, on_hopper, by_triton, rows, d_out, groups, dtype)
