"""Where each expert's rows lie, and which rows each tile of a grouped product holds: integers, on the device.

Letters: e experts, R rows of the buffer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Groups(NamedTuple):
    """Expert i owns rows starts_e[i] .. starts_e[i] + sizes_e[i] - 1; both int32. Rows nobody owns may be anything."""

    starts_e: jax.Array
    sizes_e: jax.Array


def ragged_groups(sizes_e: jax.Array) -> Groups:
    """Experts' rows one after the other; rows past the sum are unused."""
    return Groups(jnp.cumsum(sizes_e, dtype=jnp.int32) - sizes_e, sizes_e)


def capacity_groups(sizes_e: jax.Array, rows_per_expert: int) -> Groups:
    """Experts `rows_per_expert` apart, of which the first sizes_e are used."""
    return Groups(jnp.arange(sizes_e.shape[0], dtype=jnp.int32) * rows_per_expert, sizes_e)


def num_tiles(num_rows: int, num_experts: int, block_rows: int) -> int:
    """The most tiles that any sizes summing to `num_rows` can need: each expert's last one may hold a single row."""
    return max(1, (num_rows + num_experts * (block_rows - 1)) // block_rows)


def plan_tiles(groups: Groups, num_rows: int, block_rows: int) -> jax.Array:
    """int32 [num_tiles, 3]: expert, first row and number of rows of each tile, in expert order; 0 rows: not used."""
    starts_e, sizes_e = groups
    tiles_e = (sizes_e + (block_rows - 1)) // block_rows
    ends_e = jnp.cumsum(tiles_e, dtype=jnp.int32)
    tile = jnp.arange(num_tiles(num_rows, sizes_e.shape[0], block_rows), dtype=jnp.int32)
    # Compared with all ends at once: neither a sort nor a loop, and e is small.
    expert = jnp.sum(tile[:, None] >= ends_e[None, :], axis=1, dtype=jnp.int32)
    used = expert < sizes_e.shape[0]
    expert = jnp.where(used, expert, 0)
    offset = (tile - (ends_e - tiles_e)[expert]) * block_rows
    rows = jnp.where(used, jnp.minimum(sizes_e[expert] - offset, block_rows), 0)
    return jnp.stack([expert, jnp.where(used, starts_e[expert] + offset, 0), rows], axis=1)
