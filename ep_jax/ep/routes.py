"""What a router hands to the protocol: one shard's choices and how many tokens count.

Letters: T tokens of a shard, K choices per token.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ep_jax.fields import ConfigError


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


def final_weights(routes: Routes, kept_TK: jax.Array, *, rescale: bool) -> jax.Array:
    """[T,K]: weights as sums use them: as routed, or survivors' times valid sum / kept sum and zero for the rest."""
    if not rescale:
        return routes.weights_TK
    scale_T1 = survivors_scale(routes.weights_TK, routes.valid_T, kept_TK)
    return jnp.where(kept_TK, routes.weights_TK * scale_T1, 0)


def survivors_scale(weights_TK: jax.Array, valid_T: jax.Array, kept_TK: jax.Array) -> jax.Array:
    """[T,1]: valid sum / kept sum of a token's weights; zero for a token without survivors."""
    kept_sum_T1 = jnp.sum(jnp.where(kept_TK, weights_TK, 0), axis=1, keepdims=True)
    valid_sum_T1 = jnp.sum(jnp.where(valid_T[:, None], weights_TK, 0), axis=1, keepdims=True)
    some_T1 = kept_sum_T1 > 0
    return jnp.where(some_T1, valid_sum_T1 / jnp.where(some_T1, kept_sum_T1, 1), 0)


def check_routes(expert_ids_TK: jax.typing.ArrayLike, valid_T: jax.typing.ArrayLike, num_experts: int) -> None:
    """Raises ConfigError unless the ids of every valid token are distinct and from 0 to num_experts - 1.

    For values on the host or on this process's devices. Inside jit nothing can be checked: a router's own ids are right
    by construction, and ids out of range there are undefined.
    """
    ids_TK, valid_T = np.asarray(expert_ids_TK), np.asarray(valid_T)
    sorted_TK = np.sort(ids_TK, axis=1)
    outside_T = (sorted_TK[:, 0] < 0) | (sorted_TK[:, -1] >= num_experts)
    repeated_T = (sorted_TK[:, 1:] == sorted_TK[:, :-1]).any(axis=1)
    bad = np.flatnonzero(valid_T & (outside_T | repeated_T))
    if bad.size:
        raise ConfigError(
            f"expert_ids_TK of token {bad[0]} = {ids_TK[bad[0]].tolist()}: allowed are distinct ids from 0 to "
            f"{num_experts - 1}"
        )
