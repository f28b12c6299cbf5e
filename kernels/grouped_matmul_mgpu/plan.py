"""Which rows each tile of the Hopper kernel holds: integers, on the device.

Letters: e experts, R rows of the buffer, T tiles.

A cluster of two blocks computes a tile. Most of an expert's rows are in tiles of 256 rows, which the blocks halve and
whose weights they share; such a tile is in the plan once for each of its sides, the columns of the first and of the
second block. What is left, up to 192 rows, is in tiles of 128 rows, which the blocks share while each has a side of its
own. So no more than 63 rows of a tile are computed for nothing, whatever the sizes, and all tiles take as many columns.
"""

import jax
import jax.numpy as jnp

from ..grouped_matmul.tiles import Groups
from ..hopper import ALIGNED_ROWS, CLUSTER, MULTIPLIERS, UNIT

UNIT_ROWS = UNIT  # what a multiplier takes
SHORT_ROWS = MULTIPLIERS * UNIT_ROWS
TALL_ROWS = CLUSTER * SHORT_ROWS
EXPERT, START, END, FIRST_ROW, SIDE = range(5)  # rows of the expert; of the tile: SIDE is CLUSTER where it has both


def plan_tiles(groups: Groups, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """(int32 [T,5] by the column names above, int32 [1]: tiles in use, which come first, in expert order).

    An expert's first tile begins at the last aligned row that is not after its own first one, and counts from there.
    """
    before_e = groups.starts_e % ALIGNED_ROWS
    sizes_e = jnp.where(groups.sizes_e > 0, groups.sizes_e + before_e, 0)
    tall_e = (sizes_e + (UNIT_ROWS - 1)) // TALL_ROWS
    short_e = (jnp.maximum(sizes_e - tall_e * TALL_ROWS, 0) + (SHORT_ROWS - 1)) // SHORT_ROWS
    ends_e = jnp.cumsum(CLUSTER * tall_e + short_e, dtype=jnp.int32)
    tile_T = jnp.arange(most_tiles(num_rows, sizes_e.shape[0]), dtype=jnp.int32)
    expert_T = jnp.sum(tile_T[:, None] >= ends_e[None, :-1], axis=1, dtype=jnp.int32)
    start_T, tall_T = groups.starts_e[expert_T], tall_e[expert_T]
    nth_T = tile_T - (ends_e - CLUSTER * tall_e - short_e)[expert_T]
    is_tall_T = nth_T < CLUSTER * tall_T
    offset_T = jnp.where(is_tall_T, nth_T // CLUSTER * TALL_ROWS, nth_T * SHORT_ROWS)
    side_T = jnp.where(is_tall_T, nth_T % CLUSTER, CLUSTER)
    first_row_T = start_T - before_e[expert_T] + offset_T
    columns = (expert_T, start_T, start_T + groups.sizes_e[expert_T], first_row_T, side_T)
    return jnp.stack(columns, axis=1), ends_e[-1:]


def most_tiles(num_rows: int, num_experts: int) -> int:
    """At least the tiles of any sizes: an expert's rows and up to 7 before them, then 63, a tile for every 128."""
    return (num_rows + num_experts * (ALIGNED_ROWS - 1 + UNIT_ROWS - 1)) // SHORT_ROWS + num_experts
