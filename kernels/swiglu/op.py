"""SwiGLU between two grouped products, of owned rows only: one pass forward, one pass for the gradient.

Letters: R rows of the buffer, F expert hidden width. Rows that nobody owns are never read and not written. With row
weights, an expert's results come out weighted: what follows is linear. Needs a GPU; reference.py is the same in plain
JAX. No derivative here: ../grouped_mlp has it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from .. import call
from ..grouped_matmul.tiles import Groups, num_tiles, plan_tiles


@dataclasses.dataclass(frozen=True)
class Launch:
    """A program's tile of rows and of columns of gate and of up; the gradient walks over the columns."""

    rows: int = 8
    columns: int = 1024
    warps: int = 8


FORWARD_CANDIDATES = (
    Launch(),
    Launch(rows=4, warps=4),
    Launch(rows=16, columns=512),
    Launch(rows=8, columns=512, warps=4),
    Launch(rows=32, columns=256, warps=8),
)
BACKWARD_CANDIDATES = (
    Launch(rows=4),
    Launch(rows=2, warps=4),
    Launch(rows=1, warps=4),
    Launch(rows=8, columns=512),
    Launch(rows=4, columns=512, warps=4),
    Launch(rows=8, columns=256, warps=8),
)


def swiglu(
    hidden_R2F: jax.Array,
    groups: Groups,
    weights_R: jax.Array | None = None,
    launch: Launch = FORWARD_CANDIDATES[0],
) -> jax.Array:
    """silu(gate) * up [R,F], times float32 weights_R, computed in float32, in the dtype of hidden.

    The gate is the first F columns. Elements of 2 or 4 bytes, F a multiple of 8; NotImplementedError otherwise.
    """
    from .kernel import swiglu_kernel

    num_rows, hidden = hidden_R2F.shape[0], hidden_R2F.shape[1] // 2
    _check(hidden_R2F)
    return call.triton_call(
        hidden_R2F,
        groups.sizes_e if weights_R is None else weights_R,  # something must stand there; it is not read
        plan_tiles(groups, num_rows, launch.rows),
        kernel=swiglu_kernel,
        out_shape=jax.ShapeDtypeStruct((num_rows, hidden), hidden_R2F.dtype),
        programs=num_tiles(num_rows, groups.sizes_e.shape[0], launch.rows) * call.ceil_div(hidden, launch.columns),
        num_warps=launch.warps,
        F=hidden,
        WEIGHTED=weights_R is not None,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
    )


def swiglu_gradient(
    hidden_R2F: jax.Array,
    d_middle_RF: jax.Array,
    groups: Groups,
    weights_R: jax.Array | None = None,
    launch: Launch = BACKWARD_CANDIDATES[0],
) -> tuple[jax.Array, jax.Array | None]:
    """(Gradient [R,2F] of hidden, float32 gradient [R] of the weights or None), from that of `swiglu`'s output."""
    from .kernel import swiglu_gradient_kernel

    num_rows, hidden = d_middle_RF.shape
    _check(hidden_R2F)
    weighted = weights_R is not None
    d_hidden, d_weights = call.triton_call(
        hidden_R2F,
        d_middle_RF,
        weights_R if weighted else groups.sizes_e,
        plan_tiles(groups, num_rows, launch.rows),
        kernel=swiglu_gradient_kernel,
        out_shape=(
            jax.ShapeDtypeStruct(hidden_R2F.shape, hidden_R2F.dtype),
            jax.ShapeDtypeStruct((num_rows if weighted else 1,), jnp.float32),
        ),
        programs=num_tiles(num_rows, groups.sizes_e.shape[0], launch.rows),
        num_warps=launch.warps,
        F=hidden,
        WEIGHTED=weighted,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
    )
    return d_hidden, d_weights if weighted else None


def _check(hidden_R2F: jax.Array) -> None:
    call.check_rows(jax.ShapeDtypeStruct((hidden_R2F.shape[0], hidden_R2F.shape[1] // 2), hidden_R2F.dtype))
