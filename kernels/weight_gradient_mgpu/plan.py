"""Which rows each step of the weight gradient sums over: integers, on the device.

Letters: e experts, R rows of the buffer.

A step sums over 64 rows that bulk copies bring, and bulk copies of swizzled memory begin at multiples of eight rows.
So an expert's rows fall into whole steps from its first such row on, which are read where they lie, and an edge: up to
7 rows before them and up to 63 after. Edges are copied into a buffer of their own, 128 rows for each expert, with zeros
in the rest. No step then holds a row of another expert or one that nobody owns, and nothing needs a mask.

Tiles are dealt out before the kernel begins, and an expert's tiles take as long as it has steps: so experts with many
steps come first, and `tile_of` lets clusters take tiles in turns that go forth and back. In the order of experts the
clusters of an H200 waited for the last of them, which cost 2 to 13 % where sizes differed; experiments/LOG.md.
"""

import jax
import jax.numpy as jnp

from ..grouped_matmul.tiles import Groups
from ..hopper import ALIGNED_ROWS

STEP_ROWS = 64
EDGE_ROWS = 2 * STEP_ROWS  # at least 7 + 63
EXPERT, FIRST_ROW, WHOLE_STEPS, STEPS = range(4)  # of the whole steps the first row; whole ones; all, at least one


def plan_steps(groups: Groups) -> tuple[jax.Array, jax.Array]:
    """(int32 [e,4] by the column names above, int32 [e*128]: the row at each place of the edge buffer, -1 for zeros).

    Experts are in the order of their steps, most first, in the plan, and in their own order in the edge buffer. An
    expert without rows has one step, of zeros.
    """
    before_e = jnp.minimum(-groups.starts_e % ALIGNED_ROWS, groups.sizes_e)
    whole_e = (groups.sizes_e - before_e) // STEP_ROWS
    edge_e = groups.sizes_e - whole_e * STEP_ROWS
    steps_e = jnp.maximum(whole_e + (edge_e + (STEP_ROWS - 1)) // STEP_ROWS, 1)
    # An edge without rows before the whole steps may begin anywhere: there are no whole steps to read from there then.
    first_e = (groups.starts_e + before_e) // ALIGNED_ROWS * ALIGNED_ROWS
    place_1P = jnp.arange(EDGE_ROWS, dtype=jnp.int32)[None]
    after_eP = jnp.where(place_1P < before_e[:, None], 0, whole_e[:, None] * STEP_ROWS)
    row_eP = jnp.where(place_1P < edge_e[:, None], groups.starts_e[:, None] + place_1P + after_eP, -1)
    order_e = jnp.argsort(-steps_e).astype(jnp.int32)
    return jnp.stack([order_e, *(x_e[order_e] for x_e in (first_e, whole_e, steps_e))], axis=1), row_eP.reshape(-1)


def tile_of(turn: jax.Array, cluster: jax.Array, clusters: jax.Array | int) -> jax.Array:
    """The tile that a cluster takes in a turn: forth in even turns, back in odd ones."""
    return turn * clusters + jnp.where(turn % 2 == 0, cluster, clusters - 1 - cluster)
