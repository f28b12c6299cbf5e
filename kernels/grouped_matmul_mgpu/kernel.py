"""One persistent Hopper kernel: rows grouped by expert times their expert's matrix.

A block has two warpgroups that multiply and one that loads. The loading one runs ahead through a ring of `stages` slots
over all tiles of its block without a pause between tiles; the others each multiply a unit of 64 rows by block_n columns
and write it through shared memory with bulk stores while the next tile arrives. Nothing waits for both of them, so one
writes while the other multiplies. Two blocks form a cluster and share an operand, each loading half of it for both:
the weights, on 256 rows of an expert, or the rows, on what is left of an expert, where one block takes the next columns
(plan.py). Bulk copies of swizzled memory begin at multiples of eight rows, so an expert's first unit begins up to seven
rows before the expert; a unit that holds rows of others is written in pieces of 1, 2, 4 ... rows.

Letters: e experts, R rows, K summed width, N output width, T tiles.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..hopper import (
    ALIGNED_ROWS,
    CLUSTER,
    LOADER_REGISTERS,
    MULTIPLIER_REGISTERS,
    MULTIPLIERS,
    STORE_COLUMNS,
    STORE_SLOTS,
    ring_barriers,
    tiled,
)
from .plan import END, EXPERT, FIRST_ROW, SIDE, START, UNIT_ROWS


@dataclasses.dataclass(frozen=True)
class Launch:
    """A block computes 128 rows by block_n columns; `group` tiles go through all columns before the next ones."""

    block_n: int = 256
    block_k: int = 64
    stages: int = 4
    group: int = 16


def scratch(launch: Launch, dtype: Any, *, transposed: bool) -> dict[str, Any]:
    """Shared memory and barriers of a block."""
    block = (launch.block_n, launch.block_k) if transposed else (launch.block_k, launch.block_n)
    return {
        "rows_smem": plgpu.SMEM((launch.stages, MULTIPLIERS, UNIT_ROWS, launch.block_k), dtype, transforms=tiled()),
        "weights_smem": plgpu.SMEM((launch.stages, *block), dtype, transforms=tiled()),
        # Its layout is left to the compiler, which takes one whose rows can be stored from any row on.
        "out_smem": plgpu.SMEM((MULTIPLIERS, STORE_SLOTS, UNIT_ROWS, STORE_COLUMNS), dtype),
        **ring_barriers(launch.stages),
    }


def grouped_kernel(
    plan,  # int32 [T,5] of plan.py
    used,  # int32 [1]: tiles
    rows,  # [R,K]
    weights,  # [e,K,N], or where transposed [e,N,K]
    out,  # [R,N]
    rows_smem,
    weights_smem,
    out_smem,
    loaded,
    released,
    launch: Launch,
    transposed: bool,
):
    """Rows that no unit holds are not written."""
    steps = rows.shape[1] // launch.block_k
    columns = out.shape[1] // (CLUSTER * launch.block_n)
    cluster, clusters = lax.axis_index("clusters"), lax.axis_size("clusters")
    member, warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")
    num_tiles = used[0]
    num_turns = lax.div(jnp.maximum(num_tiles * columns - cluster + (clusters - 1), 0), clusters)

    def tile_of(turn):
        """(its row of the plan, this block's first row and nth columns, whether the cluster shares rows) of a turn."""
        turn = jnp.minimum(turn, jnp.maximum(num_turns - 1, 0))
        tile, column = grouped_order(cluster + turn * clusters, num_tiles, columns, launch.group)
        first_row, side = plan[tile, FIRST_ROW], plan[tile, SIDE]
        shares_rows = side == CLUSTER
        first_row += jnp.where(shares_rows, 0, member * (MULTIPLIERS * UNIT_ROWS))
        return tile, first_row, column * CLUSTER + jnp.where(shares_rows, member, side), shares_rows

    def for_all_turns(body, prepare):
        """body(turn, what `prepare` gives for it), which is asked for a turn ahead: it reads global memory."""
        lax.fori_loop(0, num_turns, lambda turn, now: (prepare(turn + 1), body(turn, now))[0], prepare(0))

    def load():
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

        def prepare(turn):
            tile, *where = tile_of(turn)
            return plan[tile, EXPERT], *where

        def load_tile(turn, prepared):
            expert, first_row, nth, shares_rows = prepared

            def copies(rows_axes, weights_axes):
                @pl.loop(0, steps)
                def _(k):
                    step = turn * steps + k
                    slot = lax.rem(step, launch.stages)
                    pl.when(step >= launch.stages)(lambda: plgpu.barrier_wait(released.at[slot]))
                    k_slice = pl.ds(k * launch.block_k, launch.block_k)
                    for unit in range(MULTIPLIERS):
                        plgpu.copy_gmem_to_smem(
                            rows.at[unit_rows(first_row + unit * UNIT_ROWS), k_slice],
                            rows_smem.at[slot, unit],
                            loaded.at[slot],
                            collective_axes=rows_axes,
                        )
                    n_slice = pl.ds(nth * launch.block_n, launch.block_n)
                    plgpu.copy_gmem_to_smem(
                        weights.at[(expert, n_slice, k_slice) if transposed else (expert, k_slice, n_slice)],
                        weights_smem.at[slot],
                        loaded.at[slot],
                        collective_axes=weights_axes,
                    )

            lax.cond(shares_rows, lambda: copies("cluster", None), lambda: copies(None, "cluster"))

        for_all_turns(load_tile, prepare)

        # A block must outlive what its neighbour does to its memory.
        num_steps = num_turns * steps

        @pl.loop(jnp.maximum(num_steps - launch.stages, 0), num_steps)
        def _(step):
            plgpu.barrier_wait(released.at[lax.rem(step, launch.stages)])

    def multiply():
        plgpu.set_max_registers(MULTIPLIER_REGISTERS, action="increase")

        def prepare(turn):
            tile, first_row, nth, _ = tile_of(turn)
            first_row += warpgroup * UNIT_ROWS
            begin = jnp.maximum(plan[tile, START] - first_row, 0)
            return first_row, nth, begin, jnp.minimum(plan[tile, END] - first_row, UNIT_ROWS)

        def multiply_unit(turn, prepared):
            first_row, nth, begin, end = prepared

            def wait(k):
                slot = lax.rem(turn * steps + k, launch.stages)
                plgpu.barrier_wait(loaded.at[slot])
                return slot

            def release(k):
                plgpu.barrier_arrive(released.at[lax.rem(turn * steps + k, launch.stages)])

            def sums(acc):
                def start(k):
                    slot = wait(k)
                    block = weights_smem.at[slot]
                    plgpu.wgmma(acc, rows_smem.at[slot, warpgroup], block.transpose((1, 0)) if transposed else block)

                start(0)

                @pl.loop(1, steps)
                def _(k):
                    start(k)
                    plgpu.wgmma_wait(1)
                    release(k - 1)

                plgpu.wgmma_wait(0)
                release(steps - 1)
                return acc[...]

            def compute():
                total = pl.run_scoped(sums, plgpu.ACC((UNIT_ROWS, launch.block_n), jnp.float32))
                store(total, nth * launch.block_n, first_row, begin, end - begin)

            def idle():
                @pl.loop(0, steps)
                def _(k):
                    wait(k)
                    release(k)

            lax.cond(end > 0, compute, idle)

        for_all_turns(multiply_unit, prepare)
        plgpu.wait_smem_to_gmem(0)

    def store(total, column, first_row, begin, num_rows):
        """`num_rows` rows of a unit from row `begin` on, in pieces of powers of two, the largest first."""
        for nth, at in enumerate(range(0, launch.block_n, STORE_COLUMNS)):
            buffer = out_smem.at[warpgroup, nth % STORE_SLOTS]
            plgpu.wait_smem_to_gmem(STORE_SLOTS - 1, wait_read_only=True)
            buffer[...] = total[:, at : at + STORE_COLUMNS].astype(out.dtype)
            plgpu.commit_smem()

            def copy(done, size, buffer=buffer, at=at):
                piece = out.at[pl.ds(first_row + done, size), pl.ds(column + at, STORE_COLUMNS)]
                plgpu.copy_smem_to_gmem(buffer.at[pl.ds(done, size)], piece, commit_group=False)

            def copy_pieces(copy=copy):
                done = begin
                for size in (UNIT_ROWS >> bit for bit in range(1, UNIT_ROWS.bit_length())):
                    pl.when((num_rows & size) != 0)(functools.partial(copy, done, size))
                    done += num_rows & size

            lax.cond(num_rows == UNIT_ROWS, functools.partial(copy, 0, UNIT_ROWS), copy_pieces)
            plgpu.commit_smem_to_gmem_group()

    lax.cond(warpgroup < MULTIPLIERS, multiply, load)


def unit_rows(first_row: jax.Array) -> pl.Slice:
    """The rows of a unit."""
    return pl.ds(pl.multiple_of(first_row, ALIGNED_ROWS), UNIT_ROWS)


def grouped_order(index: jax.Array, height: jax.Array, columns: int, group: int) -> tuple[jax.Array, jax.Array]:
    """(row tile, column tile) of a turn: column by column within `group` row tiles."""
    first = lax.div(index, group * columns) * group
    inside = lax.rem(index, group * columns)
    rows = jnp.clip(height - first, 1, group)
    return first + lax.rem(inside, rows), lax.div(inside, rows)
