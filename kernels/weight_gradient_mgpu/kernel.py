"""One persistent Hopper kernel: the gradient of each expert's matrix, summed over the expert's rows.

A block has two warpgroups that multiply and one that loads. The loading one runs ahead through a ring of `stages` slots
over all tiles of its block without a pause between tiles; the others each sum 64 by block_n numbers and write them
through shared memory with bulk stores while the next tile arrives. An expert of a thousand rows has sixteen steps a
tile, so that a pause between tiles would cost as much as several of them. Two blocks form a cluster: each has 128 of
256 columns of the rows, and they share the gradients, of which each loads half for both. plan.py says what a step
reads.

Letters: e experts, R rows, K width of the rows, N width of the gradients, P = 128*e rows of edges.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..grouped_matmul_mgpu.kernel import grouped_order
from ..hopper import (
    ALIGNED_ROWS,
    CLUSTER,
    LOADER_REGISTERS,
    MULTIPLIER_REGISTERS,
    MULTIPLIERS,
    STORE_COLUMNS,
    STORE_SLOTS,
    UNIT,
    ring_barriers,
    tiled,
)
from .plan import EDGE_ROWS, EXPERT, FIRST_ROW, STEP_ROWS, STEPS, WHOLE_STEPS, tile_of

BLOCK_K = MULTIPLIERS * UNIT  # columns of the rows: a unit for each multiplier


@dataclasses.dataclass(frozen=True)
class Launch:
    """A cluster computes 256 by block_n numbers; `group` of these tiles go through all N before the next ones."""

    block_n: int = 256
    stages: int = 4
    group: int = 8


def scratch(launch: Launch, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of a block."""
    return {
        "rows_smem": plgpu.SMEM((launch.stages, MULTIPLIERS, STEP_ROWS, UNIT), dtype, transforms=tiled()),
        "d_out_smem": plgpu.SMEM((launch.stages, STEP_ROWS, launch.block_n), dtype, transforms=tiled()),
        "sums_smem": plgpu.SMEM((MULTIPLIERS, STORE_SLOTS, UNIT, STORE_COLUMNS), dtype, transforms=tiled()),
        **ring_barriers(launch.stages),
    }


def weight_gradient_kernel(
    plan,  # int32 [e,4] of plan.py
    rows,  # [R,K]
    d_out,  # [R,N]
    edge_rows,  # [P,K]
    edge_d_out,  # [P,N]
    out,  # [e,K,N]
    rows_smem,
    d_out_smem,
    sums_smem,
    loaded,
    released,
    launch: Launch,
):
    """Writes all of out."""
    experts, height, width = out.shape
    tall, columns = height // (CLUSTER * BLOCK_K), width // launch.block_n
    cluster, clusters = lax.axis_index("clusters"), lax.axis_size("clusters")
    member, warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")
    num_tiles = experts * tall * columns
    full_turns = lax.div(num_tiles, clusters)
    num_turns = full_turns + (tile_of(full_turns, cluster, clusters) < num_tiles)

    def prepare(turn):
        """(expert, its row of the plan, this block's first k and n) of a turn."""
        tile = jnp.minimum(tile_of(turn, cluster, clusters), num_tiles - 1)
        nth = lax.div(tile, tall * columns)
        k, n = grouped_order(lax.rem(tile, tall * columns), jnp.int32(tall), columns, launch.group)
        expert, *of_plan = (plan[nth, column] for column in (EXPERT, FIRST_ROW, WHOLE_STEPS, STEPS))
        return expert, tuple(of_plan), k * (CLUSTER * BLOCK_K) + member * BLOCK_K, n * launch.block_n

    def for_all_turns(body):
        """body(what `prepare` gave for the turn, steps before it); prepares a turn ahead: it reads global memory."""

        def turn_and_next(turn, carried):
            before, prepared = carried
            following = prepare(turn + 1)
            body(prepared, before)
            _, (_, _, steps), _, _ = prepared
            return before + steps, following

        return lax.fori_loop(0, num_turns, turn_and_next, (jnp.int32(0), prepare(0)))[0]

    def load():
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

        def load_tile(prepared, before):
            expert, (first_row, whole, steps), first_k, first_n = prepared

            def copies(from_rows, from_d_out, first, slot):
                step_rows = pl.ds(pl.multiple_of(first, ALIGNED_ROWS), STEP_ROWS)
                for unit in range(MULTIPLIERS):
                    plgpu.copy_gmem_to_smem(
                        from_rows.at[step_rows, columns_of(first_k + unit * UNIT, UNIT)],
                        rows_smem.at[slot, unit],
                        loaded.at[slot],
                    )
                plgpu.copy_gmem_to_smem(
                    from_d_out.at[step_rows, columns_of(first_n, launch.block_n)],
                    d_out_smem.at[slot],
                    loaded.at[slot],
                    collective_axes="cluster",
                )

            def load_step(k, source_rows, source_d_out, first):
                slot = lax.rem(before + k, launch.stages)
                pl.when(before + k >= launch.stages)(lambda: plgpu.barrier_wait(released.at[slot]))
                copies(source_rows, source_d_out, first, slot)

            pl.loop(0, whole)(lambda k: load_step(k, rows, d_out, first_row + k * STEP_ROWS))
            pl.loop(whole, steps)(
                lambda k: load_step(k, edge_rows, edge_d_out, expert * EDGE_ROWS + (k - whole) * STEP_ROWS)
            )

        num_steps = for_all_turns(load_tile)

        # A block must outlive what its neighbour does to its memory.
        @pl.loop(jnp.maximum(num_steps - launch.stages, 0), num_steps)
        def _(step):
            plgpu.barrier_wait(released.at[lax.rem(step, launch.stages)])

    def multiply():
        plgpu.set_max_registers(MULTIPLIER_REGISTERS, action="increase")

        def multiply_tile(prepared, before):
            expert, (_, _, steps), first_k, first_n = prepared

            def sums(acc):
                def start(k):
                    slot = lax.rem(before + k, launch.stages)
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.wgmma(acc, rows_smem.at[slot, warpgroup].transpose((1, 0)), d_out_smem.at[slot])

                def release(k):
                    plgpu.barrier_arrive(released.at[lax.rem(before + k, launch.stages)])

                start(0)

                @pl.loop(1, steps)
                def _(k):
                    start(k)
                    plgpu.wgmma_wait(1)
                    release(k - 1)

                plgpu.wgmma_wait(0)
                release(steps - 1)
                return acc[...]

            total = pl.run_scoped(sums, plgpu.ACC((UNIT, launch.block_n), jnp.float32))
            unit_k = columns_of(first_k + warpgroup * UNIT, UNIT)
            for nth, at in enumerate(range(0, launch.block_n, STORE_COLUMNS)):
                buffer = sums_smem.at[warpgroup, nth % STORE_SLOTS]
                plgpu.wait_smem_to_gmem(STORE_SLOTS - 1, wait_read_only=True)
                buffer[...] = total[:, at : at + STORE_COLUMNS].astype(out.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, out.at[expert, unit_k, columns_of(first_n + at, STORE_COLUMNS)])

        for_all_turns(multiply_tile)
        plgpu.wait_smem_to_gmem(0)

    lax.cond(warpgroup < MULTIPLIERS, multiply, load)


def columns_of(first: jax.Array, size: int) -> pl.Slice:
    """`size` columns from a multiple of `size` on."""
    return pl.ds(pl.multiple_of(first, size), size)
