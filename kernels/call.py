"""How kernels are called, and what is said where another one is called than might be.

The one place that calls jax-triton: 0.3.1 with triton 3.6, the pair that works on the tested GPU machines.

All sizes are given to kernels as constants, so a kernel is compiled for its shapes, as XLA programs are.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
from jax import lax

MULTIPROCESSORS = 132  # of an H100 or H200, for lowering without one


@dataclasses.dataclass(frozen=True)
class RowLaunch:
    """The tile of a program that moves rows, `rows` by `columns`, and how it reads and writes them.

    2 to 16 loads of 16 bytes a thread: rows * columns / (32 * warps * 8) at 2 bytes an element.
    """

    rows: int = 8
    columns: int = 1024
    warps: int = 4
    load_policy: str = ""
    store_cache: str = ""

    @property
    def constants(self) -> dict[str, Any]:
        """What `triton_call` and such a kernel take of it."""
        return dict(
            num_warps=self.warps,
            ROWS=self.rows,
            COLUMNS=self.columns,
            LOAD_POLICY=self.load_policy,
            STORE_CACHE=self.store_cache,
        )


def unless_refused(instead: str, preferred: Callable[..., Any], other: Callable[..., Any], *arguments: Any) -> Any:
    """preferred(*arguments); where that raises NotImplementedError, other(*arguments).

    It is logged once, with the reason; `instead` says what is done then.
    """
    try:
        return preferred(*arguments)
    except NotImplementedError as refusal:
        log_once(f"{instead}: {refusal}")
    return other(*arguments)


@functools.cache
def log_once(message: str) -> None:
    """A warning of what is computed otherwise than it might be, the first time it is said."""
    logging.getLogger("ep_jax_kernels").warning(message)


def triton_call(
    *arrays: jax.Array,
    kernel: Any,
    out_shape: Any,
    programs: int,
    num_warps: int,
    num_stages: int = 3,
    **constants: Any,
) -> Any:
    """Runs `programs` programs of a Triton kernel; its pointers are the arrays, then the outputs of `out_shape`.

    Outputs start unwritten. Inside shard_map they vary over the mesh axes over which any input varies.
    """
    import jax_triton

    out = jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        out_shape=out_shape,
        grid=(programs,),
        num_warps=num_warps,
        num_stages=num_stages,
        **constants,
    )
    axes = _axes_of(arrays)
    return jax.tree.map(lambda array: _vary(array, axes), out)


def multiprocessors() -> int:
    """Of the GPU here."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else MULTIPROCESSORS


@functools.cache
def traced_once(make: Callable[..., Callable[..., Any]], *static: Hashable) -> Callable[..., Any]:
    """make(*static), which makes a Mosaic kernel, as one function of a program wherever it is called.

    A model of many unrolled layers then traces the kernel once, and Mosaic compiles it once: it tells kernels apart by
    their text, in which the name of the layer that calls them stands.
    """
    return jax.jit(make(*static))


def vary_alike(*trees: Any) -> Any:
    """The same arrays, each varying over all mesh axes over which any of them varies.

    For the arguments of a custom derivative inside shard_map: what it returns varies over all of them, and JAX sums the
    gradient of an argument over the axes that were added to it here.
    """
    axes = _axes_of(jax.tree.leaves(trees))
    return jax.tree.map(lambda array: _vary(array, axes), trees)


def _axes_of(arrays: Iterable[jax.Array]) -> frozenset[str]:
    return frozenset().union(*map(_varying_axes, arrays))


def _vary(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    """jax-triton says nothing of mesh axes, so JAX would take its outputs for the same on all devices."""
    missing = tuple(sorted(axes - _varying_axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def _varying_axes(array: jax.Array) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying


def check_rows(rows_NH: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Raises NotImplementedError where a row is not made of whole 16-byte accesses of 2- or 4-byte elements."""
    if rows_NH.dtype.itemsize not in (2, 4) or rows_NH.shape[1] % 8:
        raise NotImplementedError(
            f"rows of {rows_NH.shape[1]} x {rows_NH.dtype}: the kernels take elements of 2 or 4 bytes and widths "
            "that are multiples of 8"
        )


def ceil_div(value: int, divisor: int) -> int:
    """value / divisor, rounded up."""
    return -(-value // divisor)
