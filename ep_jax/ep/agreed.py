"""What the agreed transports share: everybody's counts, the rows each cell may send, and where they are stored.

Letters: S ep shards (sources and destinations), E experts, e local experts, W waves of G = ceil(e/W) consecutive local
experts, N rows of a receiver's wave buffer, T tokens, K choices, A = T*K assignments. Pure integer functions
but for `gather_counts`.

A receiver stores a wave's rows expert-major, source-major, in flat order; of every (source, expert) cell a prefix is
kept, as `agreement.py` decides.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_jax.ep.agreement import AGREED
from ep_jax.ep.capacity import Capacity, LayerShape, destination_rows, whole_rows
from ep_jax.ep.ranking import count_groups, rank_in_group
from ep_jax.ep.routes import Routes
from ep_jax.ep.settings import EPConfig


@dataclasses.dataclass(frozen=True)
class Receivers:
    """The receivers' side of an agreed transport: waves, their experts and their rows."""

    settings: EPConfig
    shape: LayerShape

    @property
    def group(self) -> int:
        """G: local experts of a wave; the last wave may have fewer."""
        return -(-self.shape.local_experts // self.settings.waves)

    @property
    def waves(self) -> int:
        return -(-self.shape.local_experts // self.group)

    def experts_of(self, wave: int) -> slice:
        """The local experts of a wave."""
        return slice(wave * self.group, min((wave + 1) * self.group, self.shape.local_experts))

    def capacity(self, wave: int) -> Capacity:
        """N of a wave."""
        experts = self.experts_of(wave)
        return destination_rows(self.settings.receiver_factor, self.shape, experts.stop - experts.start)

    def accepted_rows(self, wave: int) -> int:
        """Most rows that a destination accepts."""
        return self.capacity(wave).static_rows(self.shape.tokens * self.shape.num_shards)

    def rows(self, wave: int) -> int:
        """Static N: those, in whole groups of rows."""
        return whole_rows(self.accepted_rows(wave))

    def keep(self, counts_SE: jax.Array, group_valid: jax.Array) -> jax.Array:
        """Agreed rows int32 [S sources, S destinations, e] from everybody's counts."""
        counts = counts_SE.reshape(self.shape.num_shards, self.shape.num_shards, self.shape.local_experts)
        kept = []
        for wave in range(self.waves):
            demand = counts[:, :, self.experts_of(wave)].swapaxes(0, 1)  # destination first
            limit = jnp.broadcast_to(self.capacity(wave).logical_rows(group_valid), (self.shape.num_shards,))
            kept.append(AGREED[self.settings.agreed](demand, limit).swapaxes(0, 1))
        return jnp.concatenate(kept, axis=2)


def gather_counts(routes: Routes, num_experts: int) -> jax.Array:
    """int32 [S,E]: every shard's valid assignments per expert; the one exchange before rows move."""
    counts_E = count_groups(routes.valid_ids_TK.reshape(-1), num_experts)
    return checkpoint_name(lax.all_gather(counts_E, "ep"), "route_plan")


class InCells(NamedTuple):
    """One shard's assignments in their (destination, local expert) cells, [A] each; unspecified where id is -1."""

    destination_A: jax.Array  # int32
    local_A: jax.Array  # int32, expert id within the destination
    rank_A: jax.Array  # int32, earlier assignments of the same cell
    kept_A: jax.Array  # bool, false where the id is -1


def in_cells(ids_A: jax.Array, kept_De: jax.Array) -> InCells:
    """Cells, ranks and what is kept of one shard's ids (-1 at invalid tokens), from its agreed rows [S,e]."""
    destinations, local_experts = kept_De.shape
    destination_A, local_A = ids_A // local_experts, ids_A % local_experts
    rank_A = rank_in_group(ids_A, destinations * local_experts)
    return InCells(destination_A, local_A, rank_A, (ids_A >= 0) & (rank_A < kept_De[destination_A, local_A]))


def exclusive_sum(values: jax.Array) -> jax.Array:
    """Sum of the earlier elements along the last axis."""
    return jnp.cumsum(values, axis=-1) - values


def storage_starts(kept_SDG: jax.Array) -> jax.Array:
    """First row of each cell in its receiver's wave buffer: int32 [destination, expert, source]."""
    stored_DGS = kept_SDG.transpose(1, 2, 0)
    return exclusive_sum(stored_DGS.reshape(stored_DGS.shape[0], -1)).reshape(stored_DGS.shape)
