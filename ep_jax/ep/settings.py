"""Settings of the expert-parallel protocol: which transport, which capacity factors, which order.

No array and no device here; capacities in rows are computed in `capacity.py`.
"""

import dataclasses
from typing import ClassVar

from ep_jax.fields import ConfigError, check, setting

TRANSPORTS = ("pooled_wave", "fixed_cell", "ragged", "rowwise", "ring", "dense")
AUTO = "auto"  # see choice.py
ORDERS = ("sequence", "position", "choice", "weight")
RECEIVES = ("expert", "pool")
SLOTS = ("assignment", "token")
AGREEMENTS = ("tail", "round_robin", "water_fill")
SCHEDULES = ("sequential", "overlapped")
PAYLOADS = ("compute", "float8_e4m3")
NOT_EMULATED = ("schedule", "updates_per_cell", "payload")  # nothing is sent where shards are emulated
KERNELS = ("auto", "xla")
WITH_ROWS_SENT = ("rescale", "premix", "emulated_shards", "kernels")  # of every transport that sends rows
# Settings that a transport does not use are accepted, and named once at the start of a run.
USED: dict[str, tuple[str, ...]] = {
    "pooled_wave": (
        *("sender_factor", "receiver_factor", "order", "slots", "receive", "waves", "schedule", "payload"),
        *WITH_ROWS_SENT,
    ),
    "fixed_cell": ("sender_factor", "order", "waves", "schedule", *WITH_ROWS_SENT),
    "ragged": ("receiver_factor", "agreed", "waves", "schedule", "updates_per_cell", *WITH_ROWS_SENT),
    "rowwise": ("receiver_factor", "agreed", "waves", "schedule", *WITH_ROWS_SENT),
    "ring": ("receiver_factor", "agreed", *WITH_ROWS_SENT),
    "dense": ("kernels",),
}
USED[AUTO] = (*USED["pooled_wave"], "agreed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EPConfig:
    """How token rows reach their experts and what happens when capacity binds (DESIGN: the protocol)."""

    SECTION: ClassVar[str] = "ep"

    transport: str = setting(
        "pooled_wave",
        doc="how rows reach their experts; auto, on GPUs with kernels = dense where one holds all experts, rowwise "
        "where they can write into each other; else pooled_wave",
        choices=(*TRANSPORTS, AUTO),
    )
    sender_factor: float = setting(
        1.15, above=0.0, doc="sender pool per destination (fixed_cell: per expert), relative to balanced routing"
    )
    receiver_factor: float = setting(
        1.15,
        above=0.0,
        doc="rows per expert (pooled_wave) or per destination (agreed transports), relative to balanced routing",
    )
    order: str = setting(
        "position",
        doc="which assignments rank first in a sender pool; position treats all sequences of a shard alike, sequence "
        "(the published order) makes the last ones pay",
        choices=ORDERS,
    )
    slots: str = setting(
        "assignment",
        doc="what takes a slot of a pooled_wave sender: an assignment (published), or a token, whose row then crosses "
        "to a shard once, whatever it chose there",
        choices=SLOTS,
    )
    receive: str = setting("expert", doc="how a pooled_wave receiver shares its rows", choices=RECEIVES)
    agreed: str = setting(
        "round_robin", doc="how receivers of ragged, rowwise and ring share their rows", choices=AGREEMENTS
    )
    waves: int = setting(1, at_least=1, doc="rounds in which a layer's rows are exchanged; bounds buffer sizes")
    schedule: str = setting(
        "sequential", doc="waves one after the other, or left to the compiler to overlap", choices=SCHEDULES
    )
    rescale: bool = setting(False, doc="rescale a token's surviving weights to the sum of all its weights")
    premix: int = setting(
        1, at_least=1, doc="rows are first dealt out evenly among so many consecutive ep shards; 1 = not"
    )
    updates_per_cell: int = setting(
        0,
        at_least=0,
        doc="ragged transfers per (peer, local expert); 0 = so many as fill a GPU, 1 between processes",
    )
    payload: str = setting(
        "compute",
        doc="type in which rows go to their experts; float8_e4m3, for transport pooled_wave by name, has a scale a row "
        "and half the bytes of bfloat16 for about 4 % of error; results and gradients travel in the compute type",
        choices=PAYLOADS,
    )
    emulated_shards: int = setting(
        0,
        at_least=0,
        unit="shards",
        doc="drop what an ep group of so many shards would drop, on the devices there are; rows are computed where "
        "they are, nothing is sent; 0 = not",
    )

    kernels: str = setting(
        "auto",
        doc="auto: Triton kernels move rows and multiply them by experts on NVIDIA GPUs with jax-triton; xla: never",
        choices=KERNELS,
    )

    @property
    def used(self) -> tuple[str, ...]:
        """The settings that the chosen transport looks at."""
        used = USED[self.transport]
        if self.emulated_shards and "emulated_shards" in used:
            return tuple(name for name in used if name not in NOT_EMULATED)
        return used

    @property
    def emulates(self) -> bool:
        """Whether an ep group other than the mesh's decides the drops, and rows stay where they are."""
        return self.emulated_shards > 0 and "emulated_shards" in self.used

    @property
    def exchanges_are_short(self) -> bool:
        """Whether exchanges are better not run beside kernels that fill a GPU (preset gpu_in_order, xla_flags.py).

        A rule of thumb: so it was measured on 2 GPUs; on 64 slots of tokens are as many as of assignments.
        """
        overlaps = self.waves > 1 and self.schedule == "overlapped"
        may_be_pooled = self.transport in ("pooled_wave", "auto")  # what else auto may be has no such exchange
        return may_be_pooled and self.slots == "token" and not (overlaps or self.emulates)

    def describe(self) -> str:
        """The transport and what it uses, on one line."""
        parts = [f"{name} {getattr(self, name)}" for name in self.used]
        return ", ".join([self.transport, *parts])

    def __post_init__(self):
        check(self)
        if self.payload != "compute" and self.transport != "pooled_wave":
            raise ConfigError(
                f"ep.payload = {self.payload!r}: transport {self.transport} sends no float8 rows; allowed is compute, "
                "or transport pooled_wave"
            )
        if self.payload != "compute" and self.slots == "token":
            raise ConfigError(
                f"ep.slots = 'token': such rows go as they are, and ep.payload is {self.payload!r}; allowed is "
                "assignment, or payload compute"
            )
        if self.transport == "ring" and self.waves != 1:
            raise ConfigError(f"ep.waves = {self.waves}: transport ring has 1 wave; nearest legal value 1")


def dropless(settings: EPConfig) -> EPConfig:
    """Settings under which nothing is sent and nothing can drop: weights are gathered instead."""
    return dataclasses.replace(settings, transport="dense", waves=1, payload="compute")
