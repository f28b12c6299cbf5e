"""The setting of routing traces. What it switches on is in `recorder.py`."""

import dataclasses
from typing import ClassVar

from ep_jax.fields import check, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """How often routing is recorded."""

    SECTION: ClassVar[str] = "trace"

    every: int = setting(
        0,
        at_least=0,
        unit="steps",
        doc="record the routing of every n-th step (evaluate: batch) in trace/; every step then returns it, 5 or 6 "
        "bytes of device memory an assignment, up to four steps at a time; 0 = never",
    )

    def __post_init__(self):
        check(self)

    def due(self, step: int) -> bool:
        """Whether the step (counted from 1) is recorded."""
        return self.every > 0 and step % self.every == 0
