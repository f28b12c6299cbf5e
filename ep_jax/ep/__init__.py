"""The fixed-capacity expert-parallel protocol, usable without the rest of the stack.

`routed_experts` works on global arrays, `routed_experts_local` inside a shard_map. The specification of every policy is
in ARCHITECTURE.md; `ep_jax.ep.reference` (fates) and `reference_values` are the same in plain NumPy loops.
"""

from ep_jax.ep.drops import DropReport, LocalDrops
from ep_jax.ep.layer import routed_experts, routed_experts_local
from ep_jax.ep.routes import check_routes
from ep_jax.ep.settings import EPConfig

__all__ = ["DropReport", "EPConfig", "LocalDrops", "check_routes", "routed_experts", "routed_experts_local"]
