"""PUT: every token's row is read once and stored at its K places in the peers' buffers.

Letters: S shards, T tokens of a shard, K choices, N rows of a shard's buffer, H row width.

A worker (a warpgroup; several may share a block) walks over its tokens with a ring of rows in shared memory: bulk
loads run `ahead` tokens before the stores, and a slot is loaded again once the stores that read from it are done
reading. Loads and stores are bulk copies of a whole row; the K stores of a token share one load.

With `fan_out` a token whose choices meet again on one peer crosses the link once. It is stored at the first of its
rows there; when all shards are done, each copies such rows within its own buffer to the others. The result is the same
to the bit. With uniform routing, 2 shards and 8 choices that is a quarter of the link's bytes, with 4 shards 45 %, with
8 shards two thirds; for 4 choices of 16 experts 48, 73 and 90 %, the last of which is not worth the copying.

On 2 H200, all rows correct: 360 GB/s off each GPU at the shapes A, B and C of tools.bench (0.559 ms at A), the same
with 128 to 528 blocks and rings of 4 to 32 rows: what the link gives to kernels. 64 blocks 344, 32 blocks 295 GB/s.
With fan-out 0.363, 0.256 and about 0.66 ms at A, B and C instead of 0.559, 0.556 and 1.48, in 96 blocks of 4
warpgroups; 64 such blocks take 0.387 ms at A, 32 take 0.492.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import call
from ..index import quotient
from .exchange import MOST_SLOTS, Peers, find_place, launch_kernel, share_of, slots_that_fit


@dataclasses.dataclass(frozen=True)
class PutLaunch:
    """How a PUT runs: blocks, warpgroups of a block, rows in each ring, loads that run before the stores."""

    blocks: int = 132
    groups: int = 1
    slots: int = 16
    ahead: int = 4
    fan_out: bool = False  # a row crosses to a peer once; at most ROOM_BLOCKS fewer blocks than multiprocessors


# All blocks wait for the peers between the phases, so all must be on the GPU together, with room left for NCCL's own.
ROOM_BLOCKS = 36
RUN = 32  # rows that a worker copies in a row: their sources are one cache line


class FanOut(NamedTuple):
    """What a shard does when a token's row crosses to a peer once."""

    send_TK: jax.Array  # int32, places to send to; -1 where the peer copies
    copy_N: jax.Array  # int32, the row of my buffer to copy from; -1 for none


def put_rows(
    rows_TH: jax.Array, place_TK: jax.Array, fan_out: FanOut | None, num_rows: int, axis: str, launch: PutLaunch
) -> jax.Array:
    """[N,H] of this shard: every shard's row t lies at each of its places, a place being peer * N + row or -1."""
    (tokens, width), choices = rows_TH.shape, place_TK.shape[1]
    slots = slots_that_fit(
        min(launch.slots, MOST_SLOTS // launch.groups), launch.groups * width * rows_TH.dtype.itemsize
    )
    maps = fan_out or (place_TK,)
    return launch_kernel(
        "rowwise_put",
        put_kernel,
        rows_TH,
        *(places.reshape(-1) for places in maps),
        out=jax.ShapeDtypeStruct((num_rows, width), rows_TH.dtype),
        blocks=max(1, min(launch.blocks, call.multiprocessors() - ROOM_BLOCKS)) if fan_out else launch.blocks,
        groups=launch.groups,
        slots=slots,
        peers=Peers(axis, lax.axis_size(axis)),
        tokens=tokens,
        choices=choices,
        num_rows=num_rows,
        ahead=min(launch.ahead, slots),
    )


def fan_out_maps(place_STK: jax.Array, num_rows: int, axis: str) -> FanOut:
    """This shard's, from the places of all shards."""
    me, (shards, _, choices) = lax.axis_index(axis), place_STK.shape
    peer_STK = quotient(place_STK, num_rows)
    choice_111K = jnp.arange(choices, dtype=jnp.int32)[None, None, None]
    # By compares and sums over pairs of choices, which XLA makes one kernel of.
    together_STKK = peer_STK[..., :, None] == peer_STK[..., None, :]
    first_STK = jnp.min(jnp.where(together_STKK, choice_111K, choices), axis=3)
    from_STK = jnp.sum(jnp.where(first_STK[..., None] == choice_111K, place_STK[..., None, :], 0), axis=3)
    repeated_STK = (first_STK < choice_111K[0]) & (place_STK >= 0)
    # A source stores all rows of its own buffer itself.
    copied_STK = repeated_STK & (peer_STK != jnp.arange(shards, dtype=jnp.int32)[:, None, None])
    send_TK = jnp.where(copied_STK, -1, place_STK)[me]
    row_STK = jnp.where(copied_STK & (peer_STK == me), place_STK - me * num_rows, num_rows)
    copy_N = jnp.full((num_rows,), -1, jnp.int32).at[row_STK.reshape(-1)]
    return FanOut(send_TK, copy_N.set((from_STK - me * num_rows).reshape(-1), mode="drop"))


def put_kernel(rows, places, *refs, peers: Any, tokens, choices, num_rows, ahead) -> None:
    """Refs: rows [T,H], places [T*K], maybe copies [N], out [N,H]; ring [groups,slots,H], loaded [groups*slots]."""
    *copies, out, ring, loaded = refs
    (groups, slots, _), group = ring.shape, lax.axis_index("group")
    worker, workers = lax.axis_index("blocks") * groups + group, lax.axis_size("blocks") * groups
    share = share_of(worker, workers, tokens)

    def load(source, slot):
        plgpu.copy_gmem_to_smem(
            source, ring.at[group, slot], loaded.at[group * slots + slot], oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        )

    def walk(count, load_turn, store_turn):
        """Turns of a ring: loads run `ahead` turns before stores."""
        for turn in range(ahead):
            pl.when(turn < count)(functools.partial(load_turn, jnp.int32(turn), turn))

        @pl.loop(0, count)
        def _(turn):
            store_turn(turn, lax.rem(turn, slots))
            plgpu.commit_smem_to_gmem_group()  # one group a turn, so that groups count turns

            @pl.when(turn + ahead < count)
            def _():
                # Its slot was read by the stores of `slots` turns before; of the groups since, any may be outstanding.
                plgpu.wait_smem_to_gmem(slots - ahead, wait_read_only=True)
                load_turn(turn + ahead, lax.rem(turn + ahead, slots))

        plgpu.wait_smem_to_gmem(0)  # complete, not only read

    def store(slot, place):
        peer, row = find_place(place, num_rows)
        plgpu.copy_smem_to_gmem(ring.at[group, slot], peers.array_of(out, peer).at[row], commit_group=False)

    def load_token(turn, slot):
        load(rows.at[share.first + turn], slot)

    def store_token(turn, slot):
        plgpu.barrier_wait(loaded.at[group * slots + slot])
        for choice in range(choices):
            place = places[(share.first + turn) * choices + choice]
            pl.when(place >= 0)(functools.partial(store, slot, place))

    walk(share.count, load_token, store_token)
    peers.meet(worker, workers, everybody=bool(copies))
    if not copies:
        return

    def row_and_source(turn):
        """The turn's row of my buffer and where its copy lies, -1 when it needs none."""
        row = (lax.div(turn, RUN) * workers + worker) * RUN + lax.rem(turn, RUN)
        return row, jnp.where(row < num_rows, copies[0][jnp.minimum(row, num_rows - 1)], -1)

    def load_copy(turn, slot):
        _, source = row_and_source(turn)
        pl.when(source >= 0)(lambda: load(peers.mine(out).at[source], slot))

    def store_copy(turn, slot):
        row, source = row_and_source(turn)

        @pl.when(source >= 0)
        def _():
            plgpu.barrier_wait(loaded.at[group * slots + slot])
            plgpu.copy_smem_to_gmem(ring.at[group, slot], peers.mine(out).at[row], commit_group=False)

    runs = -(-num_rows // RUN)
    walk(lax.div(jnp.maximum(runs - worker + workers - 1, 0), workers) * RUN, load_copy, store_copy)
