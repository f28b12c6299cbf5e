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

from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.dense import Dense, DensePlan, expert_order
from ep_jax.ep.drops import DROPPED_BY_RECEIVER, KEPT
from ep_jax.ep.experts import RaggedRows
from ep_jax.ep.returned import Returned, ReturnsRows
from ep_jax.ep.routes import Routes
from ep_jax.ep.settings import EPConfig
from ep_jax.ep.simulate import simulate


@dataclasses.dataclass(frozen=True)
class Emulated(ReturnsRows):
    """The transport for one layer shape; its methods run inside shard_map over the axis `ep`."""

    settings: EPConfig
    shape: LayerShape  # of the real ep group
    waves = 1  # all that is kept is computed at once; the policy's waves are part of the decision

    @property
    def dense(self) -> Dense:
        return Dense(self.settings, self.shape)

    def plan(self, routes: Routes) -> DensePlan:
        """Sorts by expert what the emulated group keeps of the device's assignments."""
        fate_TK = self.fates(routes)
        kept_TK = fate_TK == KEPT
        plan = expert_order(jnp.where(kept_TK, routes.expert_ids_TK, -1), self.shape.num_experts)
        plan = plan._replace(sent_TK=kept_TK | (fate_TK == DROPPED_BY_RECEIVER))
        return checkpoint_name(plan, "route_plan")

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

    def dispatch(
        self, rows_TH: jax.Array, plan: DensePlan, wave: int, after: jax.Array | int
    ) -> tuple[RaggedRows, DensePlan]:
        """(RaggedRows of all experts, the plan)."""
        return self.dense.dispatch(rows_TH, plan, wave, after)

    def weights_of(self, wave: int, w_gate_up: jax.Array, w_down: jax.Array) -> tuple[jax.Array, ...]:
        """All E experts' weights."""
        return self.dense.weights_of(wave, w_gate_up, w_down)

    def give_back(self, results_AH: jax.Array, plan: DensePlan) -> Returned:
        """The rows never left."""
        return self.dense.give_back(results_AH, plan)
