"""GET: every token's K rows are read from the peers' buffers, and their sum is written once.

Letters: S shards, T tokens of a shard, K choices, N rows of a shard's buffer, H row width, P = S-1 peers, A = P*T
tokens of the peers, J = K rows of a token or K+P with fan-in.

A worker (a warpgroup; several may share a block) walks over its tokens' places with a ring of rows in shared memory:
bulk loads from the peers run `slots` rows before the sum. Terms are added in order of k, in float32, and cast once; a
place of -1 loads nothing and adds zero whatever lies in its slot.

With `fan_in` the rows that a token has on one peer are summed there first, and one row crosses the link. The sum over a
peer's rows is float32 but crosses in the rows' type: one more rounding for each peer, and the order is own rows, then
peers (relative error of a bfloat16 sum 2.1e-3 instead of 1.7e-3 with the choices of A, on CPU). It costs a pass over
the rows and a buffer [A,H] on every shard, and saves link bytes as fan-out does (put.py).

On 2 H200, all sums bitwise those of plain JAX: 334 GB/s to each GPU at the shapes A, B and C of tools.bench (0.604 ms
at A), the same with 128 to 528 blocks, and 331 with 32 blocks of 4 warpgroups. Sending results from the expert's side
instead cannot win: a PUT takes 0.559 ms, and the sum would then be a pass of its own of at least 0.12 ms. With fan-in
the two kernels take 0.377, 0.227 and about 0.60 ms together at A, B and C instead of 0.603, 0.603 and 1.60.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..index import quotient
from .exchange import MOST_SLOTS, Peers, find_place, launch_kernel, row_layout, share_of, slots_that_fit


@dataclasses.dataclass(frozen=True)
class GetLaunch:
    """How a GET runs: blocks of the grid, warpgroups of a block, rows in each warpgroup's ring."""

    blocks: int = 132
    groups: int = 1
    slots: int = 8
    fan_in: bool = False  # peers sum what a token has there; rounded once more for each peer


class FanIn(NamedTuple):
    """What a shard does when peers sum what a token has there; A and J as above."""

    partial_AK: jax.Array  # int32, rows here of the peers' tokens; -1 for none
    place_TJ: jax.Array  # int32, places of my own rows, then of the peers' sums for my tokens; -1 for none


def get_sum(rows_NH: jax.Array, place_TK: jax.Array, fan_in: FanIn | None, axis: str, launch: GetLaunch) -> jax.Array:
    """[T,H] in the rows' dtype: float32 sum over k ascending of the rows at place_TK[t,k]."""
    peers, row_bytes = Peers(axis, lax.axis_size(axis)), rows_NH.shape[1] * rows_NH.dtype.itemsize
    # A token's rows and the peers' sums are in flight together. Long rows may leave room for the former alone.
    if fan_in is None or slots_that_fit(MOST_SLOTS, row_bytes) < fan_in.place_TJ.shape[1]:
        return _sum_rows(peers, launch, rows_NH, place_TK)
    # The peers' tokens without a row here stay unwritten, and nobody reads them.
    partial_AH = _sum_rows(Peers(axis, 1), launch, rows_NH, fan_in.partial_AK, skip_empty=True)
    return _sum_rows(peers, launch, rows_NH, fan_in.place_TJ, partial_AH)


def fan_in_maps(place_STK: jax.Array, num_rows: int, axis: str) -> FanIn:
    """This shard's, from the places of all shards."""
    me, (shards, tokens, choices) = lax.axis_index(axis), place_STK.shape
    place_TK = place_STK[me]
    owner_TK = quotient(place_TK, num_rows)
    # Peers are taken in order of their distance; seen from there, I am shards - distance away.
    row_PTK = jnp.roll(place_STK, -(me + 1), axis=0)[:-1] - me * num_rows
    partial_PTK = jnp.where((row_PTK >= 0) & (row_PTK < num_rows), row_PTK, -1)
    own_TK = jnp.where(owner_TK == me, place_TK, -1)
    sums = []
    for distance in range(1, shards):
        peer = (me + distance) % shards
        first = (peer * (shards - 1) + shards - distance - 1) * tokens
        sums.append(jnp.where((owner_TK == peer).any(axis=1), first + jnp.arange(tokens, dtype=jnp.int32), -1))
    place_TJ = jnp.concatenate([own_TK, jnp.stack(sums, axis=1)], axis=1)
    return FanIn(partial_PTK.reshape(-1, choices), place_TJ)


def _sum_rows(
    peers: Peers,
    launch: GetLaunch,
    rows_NH: jax.Array,
    place_TJ: jax.Array,
    partial_AH: jax.Array | None = None,
    *,
    skip_empty: bool = False,
) -> jax.Array:
    """[T,H]: the first K of a token's places lie in rows_NH, the others in partial_AH."""
    (tokens, places), width = place_TJ.shape, rows_NH.shape[1]
    row_bytes = width * rows_NH.dtype.itemsize
    groups = min(launch.groups, MOST_SLOTS // places) or 1
    slots = slots_that_fit(min(max(launch.slots, places), MOST_SLOTS // groups), groups * row_bytes)
    if slots < places:  # a token's rows are in flight together
        groups, slots = 1, slots_that_fit(places, row_bytes)
    return launch_kernel(
        "rowwise_get" if peers.shards > 1 else "rowwise_sum",
        get_kernel,
        rows_NH,
        place_TJ.reshape(-1),
        *(() if partial_AH is None else (partial_AH,)),
        out=jax.ShapeDtypeStruct((tokens, width), rows_NH.dtype),
        blocks=launch.blocks,
        groups=groups,
        slots=slots,
        peers=peers,
        sums=0 if partial_AH is None else peers.shards - 1,
        skip_empty=skip_empty,
    )


def get_kernel(rows, places, *refs, peers: Any, sums, skip_empty) -> None:
    """Refs: rows [N,H], places [T*J], maybe partial [A,H], out [T,H]; ring [groups,slots,H], loaded [groups*slots].

    The last `sums` of a token's J places lie in partial.
    """
    *partial, out, ring, loaded = refs
    groups, group = ring.shape[0], lax.axis_index("group")
    worker, workers = lax.axis_index("blocks") * groups + group, lax.axis_size("blocks") * groups
    tokens, width = out.shape[-2:]
    per_token, slots = places.shape[-1] // tokens, ring.shape[1]
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
            is_row = lax.rem(turn, per_token) < per_token - sums
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
