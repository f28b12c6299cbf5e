"""Payload rows in float8: gather, find the row's scale, round and pack in one pass; and back by index.

Letters: N input rows, M output rows, H width. reference.py is the same in plain JAX, with what the results are. Needs a
GPU that converts e4m3 by itself: compute capability 8.9 or more.
"""

import dataclasses

import jax
import jax.numpy as jnp

from .. import call
from .reference import FLOAT8, LARGEST, LEAST_SCALE

LARGEST_WIDTH = 16384  # of a row that a program can hold


@dataclasses.dataclass(frozen=True)
class QuantizeLaunch:
    """Whole rows of a program; a thread holds rows * width / (32 * warps) elements."""

    rows: int = 1
    warps: int = 4


@dataclasses.dataclass(frozen=True)
class RestoreLaunch:
    """A program's tile of output."""

    rows: int = 8
    columns: int = 1024
    warps: int = 4


# The first of each was the fastest at bench shape A on an H200 (benchmarks/quantize_h200_20261130.json); the default.
QUANTIZE_CANDIDATES = (
    QuantizeLaunch(warps=2),
    QuantizeLaunch(),
    QuantizeLaunch(warps=8),
    QuantizeLaunch(rows=2),
    QuantizeLaunch(rows=2, warps=8),
    QuantizeLaunch(rows=4, warps=8),
    QuantizeLaunch(warps=16),
)
RESTORE_CANDIDATES = (
    RestoreLaunch(),
    RestoreLaunch(rows=4),
    RestoreLaunch(rows=16),
    RestoreLaunch(rows=16, warps=8),
    RestoreLaunch(rows=16, columns=512),
    RestoreLaunch(rows=4, columns=2048),
)


def quantize_rows(
    rows_NH: jax.Array, index_M: jax.Array, launch: QuantizeLaunch = QUANTIZE_CANDIDATES[0]
) -> tuple[jax.Array, jax.Array]:
    """(e4m3 [M,H], float32 scale_M) of rows_NH[index_M] (index int32); see reference.py.

    Elements of 2 or 4 bytes, H a multiple of 16 and at most LARGEST_WIDTH; NotImplementedError otherwise.
    """
    call.check_rows(rows_NH)
    (num_rows, width), num_out = rows_NH.shape, index_M.shape[0]
    _check_width(width)
    from .kernel import quantize_rows_kernel

    return call.triton_call(
        rows_NH,
        index_M,
        kernel=quantize_rows_kernel,
        out_shape=(jax.ShapeDtypeStruct((num_out, width), FLOAT8), jax.ShapeDtypeStruct((num_out,), jnp.float32)),
        programs=call.ceil_div(num_out, launch.rows),
        num_warps=launch.warps,
        N=num_rows,
        M=num_out,
        H=width,
        ROWS=launch.rows,
        COLUMNS=1 << (width - 1).bit_length(),
        LARGEST=LARGEST,
        LEAST_SCALE=LEAST_SCALE,
    )


def restore_rows(
    bytes_NH: jax.Array,
    index_M: jax.Array,
    scale_M: jax.Array,
    dtype: jnp.dtype,
    launch: RestoreLaunch = RESTORE_CANDIDATES[0],
) -> jax.Array:
    """bytes_NH[index_M] * scale_M (bytes e4m3, index int32, scale float32), cast once to `dtype`; see reference.py.

    H a multiple of 16 and at most LARGEST_WIDTH, `dtype` of 2 or 4 bytes; NotImplementedError otherwise.
    """
    (num_rows, width), num_out = bytes_NH.shape, index_M.shape[0]
    out = jax.ShapeDtypeStruct((num_out, width), dtype)
    call.check_rows(out)
    _check_width(width)
    from .kernel import restore_rows_kernel

    return call.triton_call(
        bytes_NH,
        index_M,
        scale_M,
        kernel=restore_rows_kernel,
        out_shape=out,
        programs=call.ceil_div(num_out, launch.rows) * call.ceil_div(width, launch.columns),
        num_warps=launch.warps,
        N=num_rows,
        M=num_out,
        H=width,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
    )


def _check_width(width: int) -> None:
    if width % 16 or width > LARGEST_WIDTH:
        raise NotImplementedError(
            f"rows of {width} bytes: the kernels take widths that are multiples of 16, at most {LARGEST_WIDTH}"
        )
    device = jax.devices()[0]
    if device.platform == "gpu" and float(device.compute_capability) < 8.9:
        raise NotImplementedError(
            f"{device.device_kind} of compute capability {device.compute_capability}: e4m3 needs 8.9 or more"
        )
