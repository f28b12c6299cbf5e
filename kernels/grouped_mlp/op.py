"""The routed experts on grouped rows: three products and SwiGLU, forward and backward, on owned rows only.

Letters: e experts, R rows of the buffer, H width, F expert hidden width. Rows that nobody owns are as in
../grouped_matmul/op.py: they reach no owned row, and in outputs and row gradients they may be anything. Needs a GPU;
reference.py is plain JAX. Kept for the gradient: rows, gate and up [R,2F], and silu(gate) * up [R,F].

Products of rows run in ../grouped_matmul_mgpu where it takes them, else in ../grouped_matmul, as do weight gradients.
"""

import dataclasses
import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from .. import call
from ..grouped_matmul import op as matmul
from ..grouped_matmul.op import Launch
from ..grouped_matmul.tiles import Groups
from ..swiglu.op import swiglu, swiglu_gradient


@dataclasses.dataclass(frozen=True)
class Methods:
    """How the products are computed."""

    warp_specialized: bool = True  # rows by ../grouped_matmul_mgpu where it takes them
    rows: Launch = matmul.CANDIDATES[0]  # otherwise
    weights: Launch = matmul.CANDIDATES[0]


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
    read. Sums and SwiGLU are float32. Dtypes and widths as `grouped_matmul` takes them; NotImplementedError otherwise.
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
    d_gate_up = matmul.weight_product(rows_RH, d_hidden_R2F, groups, w_gate_up_eH2F.dtype, methods.weights)
    d_down = matmul.weight_product(middle_RF, d_out_RH, groups, w_down_eFH.dtype, methods.weights)
    return d_rows_RH, d_gate_up, d_down, None, d_row_weights_R


_grouped_mlp.defvjp(_forward, _backward)


def _product(rows, weights, groups: Groups, methods: Methods, *, transposed: bool = False) -> jax.Array:
    if methods.warp_specialized:
        from ..grouped_matmul_mgpu import op as matmul_mgpu

        try:
            return matmul_mgpu.product(rows, weights, groups, transposed=transposed)
        except NotImplementedError:
            pass
    return matmul.product(rows, weights, groups, transposed=transposed, launch=methods.rows)
