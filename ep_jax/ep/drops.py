"""What became of every assignment: fates, counts per stage, lost combine weight.

Letters: T tokens, K choices, E experts, P stages (valid, sender, receiver), D source shards, R packed rows of a shard,
C bins of columns.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ep_jax.ep.ranking import count_groups

KEPT, DROPPED_BY_SENDER, DROPPED_BY_RECEIVER, INVALID = 0, 1, 2, 3
STAGES = ("valid", "sender", "receiver")


class LocalDrops(NamedTuple):
    """One source shard's own assignments in one layer."""

    fate_TK: jax.Array  # int8: KEPT, DROPPED_BY_SENDER, DROPPED_BY_RECEIVER or INVALID
    counts_PE: jax.Array  # int32 [3, E]: valid assignments, sender drops, receiver drops, by expert
    weights_P: jax.Array  # float32 [3]: combine weight of the same, before rescaling


class DropReport(NamedTuple):
    """One layer's drops over all shards. kept + sender + receiver = valid, to the unit, on every mesh.

    Rates are over valid assignments. Counts are int32 here; add several reports on the host in int64.
    """

    fate_TK: jax.Array  # int8, in the order of the layer's input
    counts_PE: jax.Array  # int32 [3, E]: valid, sender, receiver, by expert
    source_counts_DP: jax.Array  # int32 [D, 3]: the same by source shard, in mesh order
    weights_P: jax.Array  # float32 [3]: combine weight, before rescaling

    @property
    def valid(self) -> jax.Array:
        return self.counts_PE[0].sum()

    @property
    def sender(self) -> jax.Array:
        return self.counts_PE[1].sum()

    @property
    def receiver(self) -> jax.Array:
        return self.counts_PE[2].sum()

    @property
    def drop_rate(self) -> jax.Array:
        """(sender + receiver) / valid, 0 when nothing is valid."""
        return (self.sender + self.receiver) / jnp.maximum(self.valid, 1)

    @property
    def lost_weight(self) -> jax.Array:
        """float32 [2]: dropped combine weight over all valid weight, at the sender and at the receiver."""
        return jnp.where(self.weights_P[0] > 0, self.weights_P[1:] / self.weights_P[0], 0.0)


def fates(valid_T: jax.Array, sent_TK: jax.Array, accepted_TK: jax.Array) -> jax.Array:
    """int8 [T,K] from validity, what the sender kept and what the receiver accepted of it."""
    fate_TK = jnp.where(sent_TK, jnp.where(accepted_TK, KEPT, DROPPED_BY_RECEIVER), DROPPED_BY_SENDER)
    return jnp.where(valid_T[:, None], fate_TK, INVALID).astype(jnp.int8)


def local_drops(fate_TK: jax.Array, expert_ids_TK: jax.Array, weights_TK: jax.Array, num_experts: int) -> LocalDrops:
    """Counts and lost weights of one shard's assignments from their fates."""
    masks = (fate_TK != INVALID, fate_TK == DROPPED_BY_SENDER, fate_TK == DROPPED_BY_RECEIVER)
    counts = [count_groups(jnp.where(mask, expert_ids_TK, -1).reshape(-1), num_experts) for mask in masks]
    weights = [jnp.sum(jnp.where(mask, weights_TK, 0.0), dtype=jnp.float32) for mask in masks]
    return LocalDrops(fate_TK, jnp.stack(counts), jax.lax.stop_gradient(jnp.stack(weights)))


def profile(fate_TK: jax.Array, sequence_length: int, bins: int) -> jax.Array:
    """int32 [3, R, C]: valid assignments, sender drops and receiver drops by packed row and by bin of columns.

    A row is a place in the shard's order, so this shows who pays for being last: later documents of the shard, or later
    tokens of a sequence. The last bin may be narrower.
    """
    width = -(-sequence_length // bins)
    fate_RLK = fate_TK.reshape(-1, sequence_length, fate_TK.shape[1])
    masks = (fate_RLK != INVALID, fate_RLK == DROPPED_BY_SENDER, fate_RLK == DROPPED_BY_RECEIVER)
    counts_PRL = jnp.stack([jnp.sum(mask, axis=-1, dtype=jnp.int32) for mask in masks])
    counts_PRL = jnp.pad(counts_PRL, ((0, 0), (0, 0), (0, -sequence_length % width)))
    return counts_PRL.reshape(*counts_PRL.shape[:2], -1, width).sum(axis=-1, dtype=jnp.int32)
