"""The routed experts on grouped rows: SwiGLU fused into the grouped products, forward and backward.

Letters: e experts, R rows of the buffer, H width, F expert hidden width. Rows that nobody owns are as in
../grouped_matmul/op.py: never read, and not written in outputs and row gradients. Needs a GPU; reference.py is plain
JAX. Kept for the gradient: rows, gate and up [R,2F], and silu(gate) * up [R,F].
"""

import dataclasses
import functools

import jax

from .. import call
from ..grouped_matmul import op as matmul
from ..grouped_matmul.op import Launch
from ..grouped_matmul.tiles import Groups, num_tiles, plan_tiles

# Not timed yet: `tune.py` does. The first of each is the default; gate and up each fill block_n columns.
GATE_UP_CANDIDATES = (
    Launch(block_n=128),
    Launch(block_n=128, stages=4),
    Launch(block_n=128, group=16),
    Launch(block_n=64, warps=4),
    Launch(block_n=64, warps=4, stages=4),
    Launch(block_n=64, warps=8, stages=4),
)
GATE_UP_GRADIENT_CANDIDATES = (
    Launch(block_n=128, warps=8),
    Launch(block_n=128, warps=8, stages=4),
    Launch(block_n=128, warps=4),
    Launch(block_n=256),
    Launch(block_n=256, stages=4),
    Launch(block_m=256, block_n=128),
)


@dataclasses.dataclass(frozen=True)
class Launches:
    """One launch for each of the six products of a layer, forward and backward."""

    gate_up: Launch = GATE_UP_CANDIDATES[0]
    down: Launch = matmul.CANDIDATES[0]
    gate_up_gradient: Launch = GATE_UP_GRADIENT_CANDIDATES[0]
    row_gradient: Launch = matmul.CANDIDATES[0]
    gate_up_weights: Launch = matmul.CANDIDATES[0]
    down_weights: Launch = matmul.CANDIDATES[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def grouped_mlp(
    rows_RH: jax.Array,
    w_gate_up_eH2F: jax.Array,
    w_down_eFH: jax.Array,
    groups: Groups,
    launches: Launches = Launches(),
) -> jax.Array:
    """down(silu(gate(x)) * up(x)) of each row by its expert, in the dtype of the rows; gate columns come first.

    Sums and SwiGLU are float32. Dtypes and widths as `grouped_matmul` takes them; NotImplementedError otherwise.
    """
    return _forward(rows_RH, w_gate_up_eH2F, w_down_eFH, groups, launches)[0]


def _forward(rows_RH, w_gate_up_eH2F, w_down_eFH, groups, launches):
    hidden_R2F, middle_RF = gate_up(rows_RH, w_gate_up_eH2F, groups, launches.gate_up)
    out_RH = matmul.product(middle_RF, w_down_eFH, groups, launch=launches.down)
    return out_RH, (rows_RH, w_gate_up_eH2F, w_down_eFH, groups, hidden_R2F, middle_RF)


def _backward(launches, residuals, d_out_RH):
    rows_RH, w_gate_up_eH2F, w_down_eFH, groups, hidden_R2F, middle_RF = residuals
    d_hidden_R2F = gate_up_gradient(d_out_RH, w_down_eFH, hidden_R2F, groups, launches.gate_up_gradient)
    d_rows_RH = matmul.product(d_hidden_R2F, w_gate_up_eH2F, groups, transposed=True, launch=launches.row_gradient)
    d_gate_up = matmul.weight_product(rows_RH, d_hidden_R2F, groups, w_gate_up_eH2F.dtype, launches.gate_up_weights)
    d_down = matmul.weight_product(middle_RF, d_out_RH, groups, w_down_eFH.dtype, launches.down_weights)
    return d_rows_RH, d_gate_up, d_down, None


grouped_mlp.defvjp(_forward, _backward)


def gate_up(
    rows_RH: jax.Array, w_gate_up_eH2F: jax.Array, groups: Groups, launch: Launch = GATE_UP_CANDIDATES[0]
) -> tuple[jax.Array, jax.Array]:
    """(gate and up [R,2F], silu(gate) * up [R,F]) of owned rows. No derivative."""
    matmul.check(rows_RH, w_gate_up_eH2F)
    from .kernel import grouped_gate_up_kernel

    (num_rows, width), experts = rows_RH.shape, w_gate_up_eH2F.shape[0]
    hidden = w_gate_up_eH2F.shape[2] // 2
    return call.triton_call(
        rows_RH,
        w_gate_up_eH2F,
        plan_tiles(groups, num_rows, launch.block_m),
        kernel=grouped_gate_up_kernel,
        out_shape=tuple(jax.ShapeDtypeStruct((num_rows, n), rows_RH.dtype) for n in (2 * hidden, hidden)),
        programs=num_tiles(num_rows, experts, launch.block_m) * call.ceil_div(hidden, launch.block_n),
        num_warps=launch.warps,
        num_stages=launch.stages,
        TILES=num_tiles(num_rows, experts, launch.block_m),
        K=width,
        F=hidden,
        **matmul.block_constants(launch, rows_RH.dtype),
    )


def gate_up_gradient(
    d_out_RH: jax.Array,
    w_down_eFH: jax.Array,
    hidden_R2F: jax.Array,
    groups: Groups,
    launch: Launch = GATE_UP_GRADIENT_CANDIDATES[0],
) -> jax.Array:
    """The gradient [R,2F] of gate and up, in their dtype, from that of the layer's output. No derivative."""
    matmul.check(d_out_RH, w_down_eFH)
    from .kernel import grouped_gate_up_gradient_kernel

    (num_rows, width), (experts, hidden, _) = d_out_RH.shape, w_down_eFH.shape
    return call.triton_call(
        d_out_RH,
        w_down_eFH,
        hidden_R2F,
        plan_tiles(groups, num_rows, launch.block_m),
        kernel=grouped_gate_up_gradient_kernel,
        out_shape=jax.ShapeDtypeStruct((num_rows, 2 * hidden), hidden_R2F.dtype),
        programs=num_tiles(num_rows, experts, launch.block_m) * call.ceil_div(hidden, launch.block_n),
        num_warps=launch.warps,
        num_stages=launch.stages,
        TILES=num_tiles(num_rows, experts, launch.block_m),
        K=width,
        F=hidden,
        **matmul.block_constants(launch, d_out_RH.dtype),
    )
