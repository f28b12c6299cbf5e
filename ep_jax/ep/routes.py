"""What a router hands to the protocol: one shard's choices and how many tokens count.

Letters: T tokens of a shard, K choices per token.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routes:
    """One shard's assignments. Invalid tokens take no slot, move no row and count nowhere."""

    expert_ids_TK: jax.Array  # int32, distinct within a token
    weights_TK: jax.Array  # float32 combine weights
    valid_T: jax.Array  # bool
    group_valid: jax.Array  # int32 scalar V: valid tokens of the whole ep group
    sequence_length: int = dataclasses.field(metadata=dict(static=True))  # columns of a packed row; divides T
    position_T: jax.Array | None = None  # int32, columns of pre-mixed tokens; None: whole rows, t mod sequence_length

    @property
    def shard_valid(self) -> jax.Array:
        """int32 scalar v: valid tokens of this shard."""
        return jnp.sum(self.valid_T, dtype=jnp.int32)

    @property
    def valid_ids_TK(self) -> jax.Array:
        """Expert ids with -1 at invalid tokens."""
        return jnp.where(self.valid_T[..., None], self.expert_ids_TK, -1)
