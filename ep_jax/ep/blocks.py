"""Grouped matrix products of small experts: rows of one expert in blocks, and one batched product over all blocks.

Letters: e experts, N rows in expert order, B rows of a block, b blocks, H routed width, F expert hidden width.

XLA computes `ragged_dot` as a product with every expert, of which all but one are thrown away: with 96 experts that is
96 times the work. Here each block of rows meets its own expert's weights, which are copied once per block; that pays
as long as an expert's weights are not much larger than a block's rows (`worthwhile`). Large experts are not for this.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ep_jax.ep.rows import move_rows

MOST_ROWS = 128  # of a block
MOST_COPIED = 2  # weights copied for a block, in units of its rows before and after the products


class Blocks(NamedTuple):
    """Where rows lie when each expert's are padded to whole blocks."""

    row_bB: jax.Array  # int32, the row in each place of each block, -1 where there is none
    place_N: jax.Array  # int32, its inverse, -1 for rows past the last group
    expert_be: jax.Array  # bool, the one expert of each block; none for unused blocks


def block_rows(rows: int, experts: int) -> int:
    """B: about what an expert gets, in steps of 8, at most MOST_ROWS."""
    return min(MOST_ROWS, -(-max(rows // experts, 1) // 8) * 8)


def worthwhile(rows: int, experts: int, width: int, hidden: int) -> bool:
    """Whether copying an expert's weights [width, hidden] for each block costs less than it saves."""
    copied, used = width * hidden, block_rows(rows, experts) * (width + hidden)
    return experts > 1 and copied <= MOST_COPIED * used


def num_blocks(rows: int, experts: int) -> int:
    """b: enough however the rows are divided over the experts."""
    return -(-rows // block_rows(rows, experts)) + experts


def plan_blocks(sizes_e: jax.Array, rows: int) -> Blocks:
    """The blocks of `rows` rows (static N) of which the first sum(sizes_e) are in groups."""
    experts = sizes_e.shape[0]
    size = block_rows(rows, experts)
    ends_e = jnp.cumsum(sizes_e)
    blocks_e = -(-sizes_e // size)
    block_ends_e = jnp.cumsum(blocks_e)
    first_e, first_block_e = ends_e - sizes_e, block_ends_e - blocks_e

    block_b = jnp.arange(num_blocks(rows, experts), dtype=jnp.int32)
    expert_be = (block_b[:, None] >= first_block_e[None]) & (block_b[:, None] < block_ends_e[None])

    def of_expert(values_e):  # unused blocks get 0
        return jnp.sum(jnp.where(expert_be, values_e[None], 0), axis=1, dtype=jnp.int32)

    begin_b = of_expert(first_e) + (block_b - of_expert(first_block_e)) * size
    row_bB = begin_b[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    row_bB = jnp.where(row_bB < of_expert(ends_e)[:, None], row_bB, -1)

    row_N = jnp.arange(rows, dtype=jnp.int32)
    expert_N = jnp.minimum(jnp.searchsorted(ends_e, row_N, side="right"), experts - 1).astype(jnp.int32)
    place_N = first_block_e[expert_N] * size + row_N - first_e[expert_N]
    return Blocks(row_bB, jnp.where(row_N < ends_e[-1], place_N, -1), expert_be)


def to_blocks(rows_NH: jax.Array, blocks: Blocks) -> jax.Array:
    """[b,B,H], zero where a block holds no row."""
    places = move_rows(rows_NH, blocks.row_bB.reshape(-1), blocks.place_N[:, None])
    return places.reshape(*blocks.row_bB.shape, -1)


def from_blocks(rows_bBH: jax.Array, blocks: Blocks) -> jax.Array:
    """[N,H], zero past the last group."""
    return move_rows(rows_bBH.reshape(-1, rows_bBH.shape[-1]), blocks.place_N, blocks.row_bB.reshape(-1, 1))


def weights_of_blocks(w_eHF: jax.Array, blocks: Blocks) -> jax.Array:
    """[b,H,F]: each block's expert. A product with one-hot rows, so that its gradient is a sum in a fixed order."""
    return jnp.einsum("be,ehf->bhf", blocks.expert_be.astype(w_eHF.dtype), w_eHF)
