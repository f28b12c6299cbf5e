"""Row-wise on GPUs: the kept rows of rowwise.py, and rows that kernels write straight into the experts' buffers.

Letters: S ep shards, E experts, T tokens per shard, K choices, A = T*K, W waves, N rows of a receiver's wave buffer,
H routed width.

The GPUs of a layer wait for each other as rarely as the protocol allows. One all-gather carries all that a shard has to
tell: its counts, its assignments and their weights. From it every shard knows everybody's kept rows, hence which row
of its own buffer has which weight, before rows move. Experts weight their results inside SwiGLU, where the rows are
anyway; combine is then a plain sum and its gradient a plain dispatch (`ep_jax_kernels.rowwise.op`). So a layer of one
wave has one all-gather and two movements forward (PUT, GET), two movements and one all-gather (of the weights'
gradients) backward; each movement begins and ends with a barrier. Every further wave adds a PUT forward and a GET
backward. Where rows cross to a peer once (rowwise.once_per_peer), a GET has a kernel before it that sums at home.

Rows past the received ones are unwritten memory, which RaggedRows allows. With several waves the results are copied
into one buffer before the sum.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ep_jax_kernels.index import quotient
from ep_jax_kernels.rowwise.op import (
    FANS,
    KERNELS,
    Movements,
    RouteMap,
    collect,
    delayed,
    dispatch,
    dispatch_weights,
    route_map,
)
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_jax.ep.capacity import INT32_LIMIT
from ep_jax.ep.experts import RaggedRows
from ep_jax.ep.ranking import count_groups, rank_in_group
from ep_jax.ep.returned import Returned
from ep_jax.ep.routes import Routes, final_weights
from ep_jax.ep.rowwise import RowwiseBase, arriving, find_homes, once_per_peer


class OneSidedPlan(NamedTuple):
    whole: RouteMap  # rows in [S, W, N]: of all waves, whose buffers lie behind each other
    waves: tuple[RouteMap, ...]  # row in [S, N] of each
    sent_TK: jax.Array  # bool: every valid assignment; drops are the receivers'
    sizes_We: tuple[jax.Array, ...]  # rows that arrive for this shard's experts, by wave
    weights_WN: jax.Array  # float32 [W*N], by which this shard's experts multiply their results

    @property
    def place_TK(self) -> jax.Array:
        """Row in [S, W, N], -1 when dropped or invalid."""
        return self.whole.place_TK


class Told(NamedTuple):
    """What every shard told all others."""

    counts_SE: jax.Array  # int32, valid assignments
    ids_STK: jax.Array  # int32, -1 at invalid tokens
    rank_STK: jax.Array  # int32, earlier assignments of the same source and expert
    weights_STK: jax.Array  # float32, without a derivative


def tell_all(routes: Routes, num_experts: int) -> Told:
    """The one exchange before rows move: an all-gather of E + 2A int32. Raises NotImplementedError at E*T >= 2**31."""
    ids_TK = routes.valid_ids_TK
    (tokens, choices), ids_A = ids_TK.shape, ids_TK.reshape(-1)
    if num_experts * tokens >= INT32_LIMIT:
        raise NotImplementedError(f"{num_experts} experts x {tokens} tokens of a shard: below 2**31 is supported")
    # A token's experts are distinct, so an expert has fewer earlier assignments than there are tokens.
    cell_A = jnp.where(ids_A < 0, -1, ids_A * tokens + rank_in_group(ids_A, num_experts))
    bits_A = lax.bitcast_convert_type(routes.weights_TK.astype(jnp.float32).reshape(-1), jnp.int32)
    told_SX = lax.all_gather(jnp.concatenate([count_groups(ids_A, num_experts), cell_A, bits_A]), "ep")
    counts_SE, told_SA2 = told_SX[:, :num_experts], told_SX[:, num_experts:].reshape(-1, 2, tokens, choices)
    cell_STK, bits_STK = told_SA2[:, 0], told_SA2[:, 1]
    ids_STK = quotient(cell_STK, tokens)
    return Told(counts_SE, ids_STK, cell_STK % tokens, lax.bitcast_convert_type(bits_STK, jnp.float32))


@dataclasses.dataclass(frozen=True)
class RowwiseGPU(RowwiseBase):
    """The transport for one layer shape; its methods run inside shard_map over the axis `ep`.

    `launches` are chosen by shape where None. Rows that the kernels cannot move raise NotImplementedError when traced.
    """

    launches: Movements | None = None

    def how(self, experts: int) -> Movements:
        """The launches of movements that serve so many experts of a shard."""
        return self.launches or (FANS if once_per_peer(self.shape, experts) else KERNELS)

    def plan(self, routes: Routes) -> OneSidedPlan:
        """Agrees on the kept rows, maps everybody's to their places and puts this shard's weights in their rows."""
        receivers, me = self.receivers, lax.axis_index("ep")
        told = tell_all(routes, self.shape.num_experts)
        kept_SDe = receivers.keep(told.counts_SE, routes.group_valid)
        source_S = jnp.arange(self.shape.num_shards, dtype=jnp.int32)
        destination, wave, row_STK = find_homes(
            told.ids_STK, told.rank_STK, source_S[:, None, None], kept_SDe, receivers
        )
        place_STK = jnp.where(row_STK < 0, -1, (destination * self.waves + wave) * receivers.rows(0) + row_STK)
        rows = receivers.rows(0)

        def of_wave(wave: int) -> RouteMap:
            here_STK = (place_STK >= 0) & (place_STK // rows % self.waves == wave)
            row_STK = jnp.where(here_STK, place_STK // (self.waves * rows) * rows + place_STK % rows, -1)
            return route_map(row_STK[me], row_STK, rows, self.how(receivers.group))

        for_all = self.how(self.shape.local_experts)
        whole = route_map(place_STK[me], place_STK, self.waves * rows, for_all)
        waves = () if self.waves == 1 else tuple(of_wave(wave) for wave in range(self.waves))
        sizes = arriving(kept_SDe, me, receivers)
        place_STK, whole, waves, sizes = checkpoint_name((place_STK, whole, waves, sizes), "route_plan")
        place_TK, waves = whole.place_TK, waves or (whole,)

        def settled(weights_TK: jax.Array, valid_T: jax.Array, place_TK: jax.Array) -> jax.Array:
            """A shard's weights as its tokens' sums will use them."""
            shard = dataclasses.replace(routes, weights_TK=weights_TK, valid_T=valid_T)
            return final_weights(shard, place_TK >= 0, rescale=self.settings.rescale)

        weights_TK = settled(routes.weights_TK, routes.valid_T, place_TK)
        weights_STK = jax.vmap(settled)(told.weights_STK, told.ids_STK[..., 0] >= 0, place_STK)
        weights_WN = dispatch_weights(weights_TK, weights_STK, place_TK, place_STK, self.waves * rows, for_all.axis)
        weights_WN = checkpoint_name(weights_WN, "route_plan")
        return OneSidedPlan(whole, waves, routes.valid_ids_TK >= 0, sizes, weights_WN)

    def dispatch(self, rows_TH: jax.Array, plan: OneSidedPlan, wave: int, after: jax.Array | int) -> tuple:
        """Every shard's rows of wave `wave` in this shard's buffer: (RaggedRows, None)."""
        rows, places = self.receivers.rows(0), delayed(plan.waves[wave], after)
        how = self.how(self.receivers.group)
        put = checkpoint_name(dispatch(rows_TH, places, rows, how), "dispatched_rows")
        weights_N = plan.weights_WN[wave * rows : (wave + 1) * rows]
        return RaggedRows(put, plan.sizes_We[wave], weights_N), None

    def give_back(self, results_NH: jax.Array, arrival: None) -> Returned:
        """The wave's results of this shard's own experts, [N, H], for everybody's combine to read from."""
        return Returned(results_NH, None)

    def combine(
        self, returned: Sequence[Returned], weights_TK: jax.Array, accepted_TK: jax.Array, plan: OneSidedPlan
    ) -> jax.Array:
        """[T,H]: the sum of each token's accepted rows; the experts have multiplied them by their weights."""
        del weights_TK, accepted_TK
        # A shard's waves lie behind each other in its own buffer, as places count them.
        results = [wave.rows_QH for wave in returned]
        rows_NH = results[0] if self.waves == 1 else jnp.concatenate(results)
        # Gradients need the sum (of the layer above), never the rows: kept, it is an exchange less and few bytes.
        return checkpoint_name(collect(rows_NH, plan.whole, self.how(self.shape.local_experts)), "returned_rows")
