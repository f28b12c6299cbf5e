"""Emulated shards: the drops of a large ep group on few devices, for training and evaluation at its capacities.

Letters: S emulated ep shards, T tokens of a device, t tokens of an emulated shard, K choices, E experts.

The tokens of the real ep group, in mesh order, are dealt out as whole packed rows: the first t to shard 0, the next to
shard 1. What an ep group of S shards would drop of them is decided by `simulate`, that is by the named transport's own
plan functions, pre-mix and waves included. Every device decides for the whole group, keeps its own part, and computes
what was kept as `dense` does, with the experts' weights of the group: no row moves, so speed and traffic are not the
large group's. Drops are counted by the device that holds the token, as everywhere.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_jax.ep.dense import Dense, DensePlan, expert_order
from ep_jax.ep.drops import DROPPED_BY_RECEIVER, KEPT
from ep_jax.ep.routes import Routes, final_weights
from ep_jax.ep.simulate import simulate


@dataclasses.dataclass(frozen=True)
class Emulated(Dense):
    """The transport for the layer shape of the real ep group; its methods run inside shard_map over the axis `ep`.

    All that is kept is computed at once; the policy's waves are part of the decision.
    """

    def plan(self, routes: Routes) -> DensePlan:
        """Sorts by expert what the emulated group keeps of the device's assignments."""
        fate_TK = checkpoint_name(self.fates(routes), "route_plan")
        kept_TK = fate_TK == KEPT
        weights_TK = final_weights(routes, kept_TK, rescale=self.settings.rescale)
        plan = expert_order(jnp.where(kept_TK, routes.expert_ids_TK, -1), weights_TK, self.shape.num_experts)
        return plan._replace(sent_TK=kept_TK | (fate_TK == DROPPED_BY_RECEIVER))

    def fates(self, routes: Routes) -> jax.Array:
        """int8 [T,K]: what becomes of the device's assignments in the emulated group."""
        ids, weights = routes.valid_ids_TK, lax.stop_gradient(routes.weights_TK)
        if self.shape.num_shards > 1:  # the compiler leaves the weights out where the policy does not look at them
            ids, weights = (lax.all_gather(x, "ep") for x in (ids, weights))
        ids_StK, weights_StK = (x.reshape(self.settings.emulated_shards, -1, x.shape[-1]) for x in (ids, weights))
        fate_StK = simulate(
            ids_StK,
            weights_StK,
            ids_StK[..., 0] >= 0,
            num_experts=self.shape.num_experts,
            sequence_length=routes.sequence_length,
            settings=self.settings,
        )
        by_device_DTK = fate_StK.reshape(self.shape.num_shards, *routes.expert_ids_TK.shape)
        return by_device_DTK[lax.axis_index("ep")]
