"""Pre-mix: before dispatch, whole rows are dealt out evenly among g consecutive ep shards, and afterwards back.

Letters: T tokens per shard, K choices, g members of a group, H routed width. Row t of member i goes to member t mod g,
where it lies at (i, t div g). Documents cluster in shards; a mixed shard holds a sample of g shards' documents, so the
counts per destination even out. Any transport runs on mixed rows as on others.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ep_jax.ep.routes import Routes


def mix(rows_TH: jax.Array, routes: Routes, group: int) -> tuple[jax.Array, Routes]:
    """The mixed rows and their routes; limits count the tokens that the mixed shard holds."""
    choices = routes.weights_TK.shape[1]
    # Ids travel as floating numbers beside the weights, exact below 2^24: one exchange, and weights keep a gradient.
    ids_TK = routes.valid_ids_TK.astype(routes.weights_TK.dtype)
    mixed = _swap(jnp.concatenate([ids_TK, routes.weights_TK], axis=1), group)
    ids_TK = lax.stop_gradient(mixed[:, :choices]).astype(jnp.int32)
    member = lax.axis_index("ep") % group
    dealt = jnp.arange(rows_TH.shape[0] // group, dtype=jnp.int32) * group + member
    return _swap(rows_TH, group), Routes(
        expert_ids_TK=jnp.maximum(ids_TK, 0),
        weights_TK=mixed[:, choices:],
        valid_T=ids_TK[:, 0] >= 0,
        group_valid=routes.group_valid,
        sequence_length=routes.sequence_length,
        position_T=jnp.tile(dealt % routes.sequence_length, group),
    )


def unmix(values_TX: jax.Array, group: int) -> jax.Array:
    """Brings mixed rows [T, ...] back to their shards and places."""
    by_source = _all_to_all(values_TX.reshape(group, -1, *values_TX.shape[1:]), group)
    return by_source.swapaxes(0, 1).reshape(values_TX.shape)


def _swap(values_TX: jax.Array, group: int) -> jax.Array:
    by_member = values_TX.reshape(-1, group, *values_TX.shape[1:]).swapaxes(0, 1)
    return _all_to_all(by_member, group).reshape(values_TX.shape)


def _all_to_all(blocks: jax.Array, group: int) -> jax.Array:
    """Block j of each member to member j of its group. Its own transpose."""
    shards = lax.axis_size("ep")
    groups = [list(range(first, first + group)) for first in range(0, shards, group)]
    whole = None if group == shards else groups
    return lax.all_to_all(blocks, "ep", split_axis=0, concat_axis=0, axis_index_groups=whole)
