"""Settings of the expert-parallel protocol: which transport, which capacity factors, which order.

No array and no device here; capacities in rows are computed in `capacity.py`.
"""

import dataclasses
from typing import ClassVar

from ep_jax.fields import ConfigError, check, setting

TRANSPORTS = ("pooled_wave", "ragged", "dense")
ORDERS = ("sequence", "position")
SCHEDULES = ("sequential", "overlapped")
# Settings that a transport does not use are accepted, and named once at the start of a run.
USED = {
    "pooled_wave": ("sender_factor", "receiver_factor", "order", "receive", "waves", "schedule", "rescale"),
    "ragged": ("receiver_factor", "agreed", "waves", "schedule", "rescale", "updates_per_cell"),
    "dense": (),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EPConfig:
    """How token rows reach their experts and what happens when capacity binds (DESIGN: the protocol)."""

    SECTION: ClassVar[str] = "ep"

    transport: str = setting("pooled_wave", doc="how rows reach their experts", choices=TRANSPORTS)
    sender_factor: float = setting(
        1.15, above=0.0, doc="sender pool per destination, relative to balanced routing (pooled_wave)"
    )
    receiver_factor: float = setting(
        1.15, above=0.0, doc="rows per expert (pooled_wave) or per destination (ragged), relative to balanced routing"
    )
    order: str = setting("sequence", doc="which assignments rank first in a sender pool", choices=ORDERS)
    receive: str = setting("expert", doc="how a pooled_wave receiver shares its rows", choices=("expert",))
    agreed: str = setting("round_robin", doc="how ragged receivers share their rows", choices=("round_robin",))
    waves: int = setting(1, at_least=1, doc="rounds in which a layer's rows are exchanged; bounds buffer sizes")
    schedule: str = setting(
        "sequential", doc="waves one after the other, or left to the compiler to overlap", choices=SCHEDULES
    )
    rescale: bool = setting(False, doc="rescale a token's surviving weights to the sum of all its weights")
    updates_per_cell: int = setting(
        1, at_least=1, doc="ragged transfers per (peer, local expert); more can be faster on GPUs"
    )

    @property
    def used(self) -> tuple[str, ...]:
        """The settings that the chosen transport looks at."""
        return USED[self.transport]

    def describe(self) -> str:
        """The transport and what it uses, on one line."""
        parts = [f"{name} {getattr(self, name)}" for name in self.used]
        return ", ".join([self.transport, *parts])

    def __post_init__(self):
        check(self)
        if self.transport == "dense" and self.waves != 1:
            raise ConfigError(f"ep.waves = {self.waves}: transport dense has 1 wave; nearest legal value 1")
