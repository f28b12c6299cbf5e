"""GET: every token's K rows are read from the peers' buffers, and their (weighted) sum is written once.

Letters: S shards, T tokens of a shard, K choices, N rows of a shard's buffer, H row width, P = S-1 peers, A = P*T
tokens of the peers, J = K rows of a token or K+P with fan-in.

A worker (a warpgroup; several may share a block) walks over its tokens' places with a ring of rows in shared memory:
bulk loads from the peers run `slots` rows before the sum. Terms are added in order of k, in float32, and cast once; a
place of -1 loads nothing and adds zero whatever lies in its slot.

On 2 H200, all sums bitwise those of plain JAX: 334 GB/s to each GPU at the shapes A, B and C of tools.bench (0.604 ms
at A), weighted or not, the same with 128 to 528 blocks, and 331 with 32 blocks of 4 warpgroups. Sending results from
the expert's side instead cannot win: a PUT takes 0.559 ms, and the sum would then be a pass of its own of at least
0.12 ms.

`fan_in` (off by default, not run on a GPU yet): the rows that a token has on one peer are summed there first, and one
row crosses the link. The sum over a peer's rows is float32 but crosses in the rows' type: one more rounding for each
peer, and the order is own rows, then peers. It costs a pass over the rows and a buffer [A,H] on every shard, and
saves link bytes as fan-out does (put.py).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .exchange import MOST_SLOTS, Peers, find_place, launch_kernel, row_layout, share_of, slots_that_fit


@dataclasses.dataclass(frozen=True)
class GetLaunch:
    """How a GET runs: blocks of the grid, warpgroups of a block, rows in each warpgroup's ring."""

    blocks: int = 132
    groups: int = 1
    slots: int = 8
    fan_in: bool = False  # peers sum what a token has there; rounded once more for each peer


def get_sum(
    rows_NH: jax.Array, weights_TK: jax.Array | None, place_TK: jax.Array, axis: str, launch: GetLaunch
) -> jax.Array:
    """[T,H] in the rows' dtype: float32 sum over k ascending of (weights_TK[t,k] times) the row at place_TK[t,k]."""
    peers, choices = Peers(axis, lax.axis_size(axis)), place_TK.shape[1]
    if not launch.fan_in or peers.shards == 1 or choices == 1:
        return _sum_rows(peers, launch, rows_NH, place_TK, weights_TK)
    partial_AK, place_TJ = fan_in_maps(place_TK, rows_NH.shape[0], axis)
    weights_AK = None if weights_TK is None else _of_peers(weights_TK, axis)
    # The peers' tokens without a row here stay unwritten, and nobody reads them.
    partial_AH = _sum_rows(Peers(axis, 1), launch, rows_NH, partial_AK, weights_AK, skip_empty=True)
    return _sum_rows(peers, launch, rows_NH, place_TJ, weights_TK, partial_AH)


def fan_in_maps(place_TK: jax.Array, num_rows: int, axis: str) -> tuple[jax.Array, jax.Array]:
    """(rows here of the peers' tokens [A,K]; places of my own rows, then of the peers' sums for my tokens [T,J])."""
    me, shards, (tokens, _) = lax.axis_index(axis), lax.axis_size(axis), place_TK.shape
    owner_TK = jnp.where(place_TK < 0, -1, place_TK // num_rows)
    row_AK = _of_peers(place_TK, axis) - me * num_rows
    partial_AK = jnp.where((row_AK >= 0) & (row_AK < num_rows), row_AK, -1)
    own_TK = jnp.where(owner_TK == me, place_TK, -1)
    sums = []
    for distance in range(1, shards):
        # Peers are taken in order of their distance; seen from there, I am shards - distance away.
        peer = (me + distance) % shards
        first = (peer * (shards - 1) + shards - distance - 1) * tokens
        sums.append(jnp.where((owner_TK == peer).any(axis=1), first + jnp.arange(tokens, dtype=jnp.int32), -1))
    return partial_AK, jnp.concatenate([own_TK, jnp.stack(sums, axis=1)], axis=1)


def _of_peers(array_TK: jax.Array, axis: str) -> jax.Array:
    """[A,K]: the arrays of shards me+1, me+2, ... (cyclic)."""
    tokens = array_TK.shape[0]
    everybody = lax.all_gather(array_TK, axis, tiled=True)
    return jnp.roll(everybody, -(lax.axis_index(axis) + 1) * tokens, axis=0)[:-tokens]


def _sum_rows(
    peers: Peers,
    launch: GetLaunch,
    rows_NH: jax.Array,
    place_TJ: jax.Array,
    weights_TK: jax.Array | None,
    partial_AH: jax.Array | None = None,
    *,
    skip_empty: bool = False,
) -> jax.Array:
    """[T,H]: the first K of a token's places lie in rows_NH and are weighted, the others in partial_AH."""
    (tokens, places), width = place_TJ.shape, rows_NH.shape[1]
    row_bytes = width * rows_NH.dtype.itemsize
    groups = min(launch.groups, MOST_SLOTS // places) or 1
    slots = slots_that_fit(min(max(launch.slots, places), MOST_SLOTS // groups), groups * row_bytes)
    if slots < places:  # a token's rows are in flight together
        groups, slots = 1, slots_that_fit(places, row_bytes)
    if slots < places:
        raise NotImplementedError(f"{places} rows of {row_bytes} bytes: {slots} of them fit into shared memory")
    body = functools.partial(
        get_kernel,
        peers=peers,
        sizes=(places if partial_AH is None else places - peers.shards + 1, places),
        weighted=weights_TK is not None,
        skip_empty=skip_empty,
        blocks=launch.blocks,
        groups=groups,
    )
    optional = [array for array in (weights_TK, partial_AH) if array is not None]
    return launch_kernel(
        "rowwise_get" if peers.shards > 1 else "rowwise_sum",
        body,
        rows_NH,
        place_TJ.reshape(-1),
        *(array.reshape(-1) if array is weights_TK else array for array in optional),
        out=((tokens, width), rows_NH.dtype),
        blocks=launch.blocks,
        groups=groups,
        scratch=[
            plgpu.SMEM((groups, slots, width), rows_NH.dtype),
            plgpu.Barrier(num_barriers=groups * slots),
        ],
    )


def get_kernel(rows, places, *refs, peers: Any, sizes, weighted, skip_empty, blocks, groups) -> None:
    """Refs: rows [N,H], places [T*J], maybe weights [T*K], maybe partial [A,H], out [T,H]; ring [groups,slots,H],
    loaded [groups*slots]. sizes is (K, J)."""
    *optional, out, ring, loaded = refs
    weights, partial = optional[: int(weighted)], optional[int(weighted) :]
    group, (choices, per_token) = lax.axis_index("group"), sizes
    worker, workers = lax.axis_index("blocks") * groups + group, blocks * groups
    tokens, width = out.shape[-2:]
    slots = ring.shape[1]
    share = share_of(worker, workers, tokens)

    def load(turn):
        slot, place = lax.rem(turn, slots), places[share.first * per_token + turn]

        def load_from(array):
            peer, row = find_place(place, array.shape[-2])
            plgpu.copy_gmem_to_smem(
                peers.array_of(array, peer).at[row],
                ring.at[group, slot],
                loaded.at[group * slots + slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # else a descriptor, which would name the peer
            )

        if partial:
            is_row = lax.rem(turn, per_token) < choices
            pl.when((place >= 0) & is_row)(functools.partial(load_from, rows))
            pl.when((place >= 0) & jnp.logical_not(is_row))(functools.partial(load_from, partial[0]))
        else:
            pl.when(place >= 0)(functools.partial(load_from, rows))

    def sum_token(turn):
        token, total = share.first + turn, None
        for choice in range(per_token):
            slot, there = lax.rem(turn * per_token + choice, slots), places[token * per_token + choice] >= 0
            pl.when(there)(functools.partial(plgpu.barrier_wait, loaded.at[group * slots + slot]))
            term = plgpu.load(ring.at[group, slot], layout=row_layout(width, ring.dtype)).astype(jnp.float32)
            if weighted and choice < choices:
                term = term * weights[0][token * choices + choice]
            term = jnp.where(there, term, jnp.zeros_like(term))
            total = term if total is None else total + term
        assert total is not None
        out[token] = total.astype(out.dtype)

    for turn in range(slots):
        pl.when(turn < share.count * per_token)(functools.partial(load, jnp.int32(turn)))

    @pl.loop(0, share.count)
    def _(turn):
        if skip_empty:
            last = places[(share.first + turn) * per_token]
            for choice in range(1, per_token):
                last = jnp.maximum(last, places[(share.first + turn) * per_token + choice])
            pl.when(last >= 0)(functools.partial(sum_token, turn))
        else:
            sum_token(turn)
        plgpu.commit_smem()  # the slots have been read by all threads before bulk copies write them again
        for choice in range(per_token):
            next_turn = turn * per_token + choice + slots
            pl.when(next_turn < share.count * per_token)(functools.partial(load, next_turn))

    peers.meet(worker, workers)
