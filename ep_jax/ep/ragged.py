"""Ragged all-to-all: counts are agreed before rows move, rows arrive grouped by expert without padding.

Letters: S ep shards, E experts, e local experts, T tokens per shard, K choices, W waves of G = ceil(e/W) consecutive
local experts, N rows of a receiver's wave buffer, B rows of a sender's wave buffer, Q = W*B, U updates per cell,
X = S*G*U updates, H routed width.

One all-gather of counts lets every shard compute the same kept rows per (source, expert). A sender's buffer holds its
kept rows destination-major, expert-major, in flat order; a receiver's holds them expert-major, source-major. Each
(peer, local expert) cell travels as U updates of one `jax.lax.ragged_all_to_all` (`ep.updates_per_cell`); results
return over the same path. XLA:CPU has no such operation, so an all-gather and a row gather give the same result there.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ep_jax_kernels.index import quotient
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_jax.ep.agreed import Receivers, exclusive_sum, gather_counts, in_cells, storage_starts
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.experts import RaggedRows
from ep_jax.ep.ranking import invert
from ep_jax.ep.returned import Returned, ReturnsRows
from ep_jax.ep.routes import Routes
from ep_jax.ep.rows import move_rows, take_rows
from ep_jax.ep.settings import EPConfig
from ep_jax.mesh import varying_axes

# XLA's kernel gives every update the same few blocks, so few updates leave most of a GPU idle. On 2 H200 at bench shape
# A 512 of them moved 335 GB/s off a GPU, and 2,048 of 32 rows each 361, the link's own rate (experiments/LOG.md).
UPDATES_OF_A_WAVE = 1024
ROWS_OF_AN_UPDATE = 8  # at least, on balanced routing


class Updates(NamedTuple):
    """Arguments of one ragged exchange, int32 [X] each, peer-major."""

    input_offsets: jax.Array  # first row in my buffer, by receiving peer
    send_sizes: jax.Array
    output_offsets: jax.Array  # first row in the peer's buffer
    recv_sizes: jax.Array  # rows that come, by sending peer


class WavePlan(NamedTuple):
    """One wave's part of the plan of one shard."""

    outward: Updates
    homeward: Updates
    sizes_G: jax.Array  # rows that arrive for each local expert of the wave


class RaggedPlan(NamedTuple):
    place_TK: jax.Array  # row in [W, B] of the sender's buffers, -1 when dropped or invalid
    assignment_Q: jax.Array  # its inverse
    sent_TK: jax.Array  # bool: every valid assignment; drops are the receivers'
    waves: tuple[WavePlan, ...]


def plan_wave(kept_SDG: jax.Array, me: jax.Array, updates_per_cell: int) -> WavePlan:
    """Offsets and sizes of one wave for shard `me`, from everybody's kept rows [source, destination, expert]."""
    shards, _, group = kept_SDG.shape
    send_start_SDG = exclusive_sum(kept_SDG.reshape(shards, -1)).reshape(kept_SDG.shape)
    store_start_DGS = storage_starts(kept_SDG)

    sent_DG, came_SG = kept_SDG[me], kept_SDG[:, me]
    outward = (send_start_SDG[me], sent_DG, store_start_DGS[:, :, me], came_SG)
    homeward = (store_start_DGS[me].T, came_SG, send_start_SDG[:, me], sent_DG)
    return WavePlan(_split(*outward, updates_per_cell), _split(*homeward, updates_per_cell), jnp.sum(came_SG, axis=0))


def _split(start_in, sent, start_out, came, pieces: int) -> Updates:
    """Cells [peer, expert] cut into `pieces` updates each, of nearly equal size."""
    piece = jnp.arange(pieces, dtype=jnp.int32)[None, None]

    def cut(sizes):  # first row of each piece within its cell, and its size, without overflowing int32
        whole, rest = sizes[..., None] // pieces, sizes[..., None] % pieces
        return piece * whole + jnp.minimum(piece, rest), whole + (piece < rest)

    first, size = cut(sent)
    flat = (start_in[..., None] + first, size, start_out[..., None] + first, cut(came)[1])
    return Updates(*(part.reshape(-1).astype(jnp.int32) for part in flat))


@dataclasses.dataclass(frozen=True)
class Ragged(ReturnsRows):
    """The transport for one layer shape; its methods run inside shard_map over the axis `ep`."""

    settings: EPConfig
    shape: LayerShape

    @property
    def receivers(self) -> Receivers:
        return Receivers(self.settings, self.shape)

    @property
    def waves(self) -> int:
        return self.receivers.waves

    @property
    def updates_per_cell(self) -> int:
        """U: as set, or where that is 0 enough updates of a wave to fill a GPU, of several rows each.

        One where XLA's kernel does not run: on CPU, and between processes, where NCCL sends each update on its own.
        """
        if self.settings.updates_per_cell:
            return self.settings.updates_per_cell
        if jax.default_backend() != "gpu" or jax.process_count() > 1:
            return 1
        wanted = -(-UPDATES_OF_A_WAVE // (self.shape.num_shards * self.receivers.group))
        return max(1, min(wanted, self.shape.assignments // self.shape.num_experts // ROWS_OF_AN_UPDATE))

    def sender_rows(self) -> int:
        """Static B: most rows that a shard can send in a wave."""
        return self.shape.tokens * min(self.shape.experts_per_token, self.shape.num_shards * self.receivers.group)

    def plan(self, routes: Routes) -> RaggedPlan:
        """Agrees on the kept rows and lays them out at both ends."""
        shape, receivers, ids_TK = self.shape, self.receivers, routes.valid_ids_TK
        kept_SDe = receivers.keep(gather_counts(routes, shape.num_experts), routes.group_valid)
        me = lax.axis_index("ep")
        destination_A, local_A, rank_A, kept_A = in_cells(ids_TK.reshape(-1), kept_SDe[me])
        waves, starts = [], []
        for wave in range(self.waves):
            kept_SDG = kept_SDe[:, :, receivers.experts_of(wave)]
            waves.append(plan_wave(kept_SDG, me, self.updates_per_cell))
            starts.append(exclusive_sum(kept_SDG[me].reshape(-1)).reshape(kept_SDG[me].shape))
        start_De = jnp.concatenate(starts, axis=1)  # first row of a cell in the sender's buffer of its wave
        row_A = (local_A // receivers.group) * self.sender_rows() + start_De[destination_A, local_A] + rank_A
        place_A = jnp.where(kept_A, row_A, -1)
        plan = RaggedPlan(
            place_TK=place_A.reshape(ids_TK.shape),
            assignment_Q=invert(place_A, self.waves * self.sender_rows()),
            sent_TK=ids_TK >= 0,
            waves=tuple(waves),
        )
        return checkpoint_name(plan, "route_plan")

    def dispatch(
        self, rows_TH: jax.Array, plan: RaggedPlan, wave: int, after: jax.Array | int
    ) -> tuple[RaggedRows, WavePlan]:
        """Sends wave `wave`'s rows: (RaggedRows of its experts, the WavePlan to return them by)."""
        size = self.sender_rows()
        assignment_B = plan.assignment_Q[wave * size : (wave + 1) * size]
        token_B = quotient(assignment_B, self.shape.experts_per_token) + after
        here_TK = (plan.place_TK >= 0) & (plan.place_TK // size == wave)
        rows_BH = move_rows(rows_TH, token_B, jnp.where(here_TK, plan.place_TK % size, -1))
        this = plan.waves[wave]
        received = exchange(rows_BH, this.outward, this.homeward, self.receivers.rows(wave))
        received = checkpoint_name(received, "dispatched_rows")
        return RaggedRows(received, this.sizes_G), this

    def weights_of(self, wave: int, w_gate_up: jax.Array, w_down: jax.Array) -> tuple[jax.Array, ...]:
        """The weights of the wave's experts."""
        experts = self.receivers.experts_of(wave)
        return w_gate_up[experts], w_down[experts]

    def give_back(self, results_NH: jax.Array, this: WavePlan) -> Returned:
        """Returns results to their sources, in sender order."""
        returned = exchange(results_NH, this.homeward, this.outward, self.sender_rows())
        returned = checkpoint_name(returned, "returned_rows")
        return Returned(returned, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def exchange(rows: jax.Array, forth: Updates, back: Updates, out_rows: int) -> jax.Array:
    """Rows moved by the updates `forth` into a buffer of `out_rows` rows; `back` is the reverse movement.

    The gradient moves back by `back`: it does not rely on the derivative of the collective. Rows that nobody wrote
    are unwritten memory on GPUs and belong to nobody; readers select by count.
    """
    del back
    move = functools.partial(lax.platform_dependent, rows, *forth)
    return move(cpu=functools.partial(_emulated, out_rows), default=functools.partial(_ragged_all_to_all, out_rows))


def _exchange_forward(rows, forth, back, out_rows):
    return exchange(rows, forth, back, out_rows), (forth, back, rows[:, :0])


def _exchange_backward(out_rows, residuals, gradient):
    forth, back, like = residuals
    return exchange(gradient, back, forth, like.shape[0]), None, None


exchange.defvjp(_exchange_forward, _exchange_backward)


def _ragged_all_to_all(out_rows, rows, input_offsets, send_sizes, output_offsets, recv_sizes):
    axes = tuple(varying_axes(rows) | varying_axes(send_sizes))
    out = lax.empty((out_rows, rows.shape[1]), rows.dtype)
    out = lax.pcast(out, axes, to="varying") if axes else out
    return lax.ragged_all_to_all(rows, out, input_offsets, send_sizes, output_offsets, recv_sizes, axis_name="ep")


def _emulated(out_rows, rows, input_offsets, send_sizes, output_offsets, recv_sizes):
    """What ragged_all_to_all does, from an all-gather of everything. For the CPU."""
    del recv_sizes
    me, shards = lax.axis_index("ep"), lax.axis_size("ep")
    all_rows = lax.all_gather(rows, "ep")
    to_me = [
        lax.all_gather(part, "ep").reshape(shards, shards, -1)[:, me].reshape(-1)
        for part in (input_offsets, send_sizes, output_offsets)
    ]
    first_in, size, first_out = to_me  # [source, update] flattened
    source = jnp.repeat(jnp.arange(shards, dtype=jnp.int32), size.shape[0] // shards)
    row = jnp.arange(out_rows, dtype=jnp.int32)[:, None]
    begin, end = first_out[None], (first_out + size)[None]
    covers = (row >= begin) & (row < end)  # [out_rows, updates]; at most one is true
    origin = jnp.where(covers, (source * rows.shape[0] + first_in)[None] + row - begin, 0).sum(axis=1)
    index = jnp.where(covers.any(axis=1), origin, -1)
    return take_rows(all_rows.reshape(-1, rows.shape[1]), index)
