"""Row-wise on GPUs: the plan of rowwise.py, and rows that kernels write straight into the experts' buffers.

Letters: S ep shards, T tokens per shard, K choices, W waves, N rows of a receiver's wave buffer, H routed width.

Acceptance is agreed before rows move, so a row's weight is known when it leaves and travels beside it. Experts weight
their results inside SwiGLU, where the rows are anyway; combine is then a plain sum and its gradient a plain dispatch
(`ep_jax_kernels.rowwise.op`). Each of the four movements is one kernel. Rows past the received ones are unwritten
memory, which RaggedRows allows. With several waves the results are copied into one buffer before the sum.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from ep_jax_kernels.rowwise.op import KERNELS, Movements, collect, dispatch, dispatch_weights
from jax.ad_checkpoint import checkpoint_name

from ep_jax.ep.agreed import Receivers
from ep_jax.ep.experts import RaggedRows
from ep_jax.ep.returned import Returned
from ep_jax.ep.routes import Routes, rescaled_weights
from ep_jax.ep.rowwise import Rowwise, RowwisePlan

ALIGNED_ROWS = 8


class WholeReceivers(Receivers):
    """Buffers of whole groups of 8 rows, which the grouped products need; what is accepted stays the same."""

    def rows(self, wave: int) -> int:
        """Static N."""
        return -(-super().rows(wave) // ALIGNED_ROWS) * ALIGNED_ROWS


@dataclasses.dataclass(frozen=True)
class RowwiseGPU(Rowwise):
    """The transport for one layer shape; its methods run inside shard_map over the axis `ep`.

    `how` names the launches. Rows that the kernels cannot move raise NotImplementedError when traced.
    """

    how: Movements = KERNELS

    @property
    def receivers(self) -> WholeReceivers:
        return WholeReceivers(self.settings, self.shape)

    def plan(self, routes: Routes) -> RowwisePlan:
        """Agrees on the kept rows, maps each to its row and settles its weight."""
        plan = super().plan(routes)
        kept_TK = plan.place_TK >= 0
        weights_TK = rescaled_weights(routes, kept_TK) if self.settings.rescale else routes.weights_TK
        return plan._replace(weights_TK=weights_TK)

    def dispatch(self, rows_TH: jax.Array, plan: RowwisePlan, wave: int, after: jax.Array | int) -> tuple:
        """Every shard's rows of wave `wave` in this shard's buffer: (RaggedRows, None)."""
        rows = self.receivers.rows(0)
        first = wave * self.shape.num_shards * rows
        here_TK = (plan.place_TK >= first) & (plan.place_TK < first + self.shape.num_shards * rows)
        place_TK = jnp.where(here_TK, plan.place_TK - first, -1) + after
        put = checkpoint_name(dispatch(rows_TH, place_TK, rows, self.how), "dispatched_rows")
        assert plan.weights_TK is not None
        weights_N = checkpoint_name(dispatch_weights(plan.weights_TK, place_TK, rows, self.how), "dispatched_rows")
        return RaggedRows(put, plan.sizes_We[wave], weights_N), None

    def give_back(self, results_NH: jax.Array, arrival: None) -> Returned:
        """The wave's results of this shard's own experts, [N, H], for everybody's combine to read from."""
        return Returned(checkpoint_name(results_NH, "returned_rows"), None)

    def combine(
        self, returned: Sequence[Returned], weights_TK: jax.Array, accepted_TK: jax.Array, plan: RowwisePlan
    ) -> jax.Array:
        """[T,H]: the sum of each token's accepted rows; the experts have multiplied them by plan.weights_TK."""
        del weights_TK
        rows, shards, waves = self.receivers.rows(0), self.shape.num_shards, self.waves
        # From a row in [W, S, N] to one in [S, W, N]: a shard's waves lie behind each other in its own buffer.
        wave_TK, peer_TK = plan.place_TK // (shards * rows), plan.place_TK // rows % shards
        place_TK = (peer_TK * waves + wave_TK) * rows + plan.place_TK % rows
        place_TK = jnp.where(accepted_TK & (plan.place_TK >= 0), place_TK, -1)
        results = [wave.rows_QH for wave in returned]
        return collect(results[0] if waves == 1 else jnp.concatenate(results), place_TK, self.how)
