"""Which policies to replay: all combinations of what was asked for, without those that differ in unused settings only.

A family is a policy without its capacity factors. No array and no device here.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.settings import EPConfig
from ep_jax.fields import ConfigError

NUMBERS = ("waves", "premix")
VARIED = ("order", "slots", "receive", "agreed", *NUMBERS)  # settings of a family beside its transport
TRANSPORTS = ("pooled_wave", "fixed_cell", "ragged", "rowwise", "ring")  # dense moves weights and drops nothing
# How many of an expert's assignments these keep depends on counts alone, not on the order of assignments.
ORDER_FREE = ("ragged", "rowwise", "ring")


@dataclasses.dataclass(frozen=True)
class Family:
    """A policy but for its factors; those of `settings` mean nothing."""

    settings: EPConfig
    shards: int

    @property
    def uses_sender(self) -> bool:
        return "sender_factor" in self.settings.used

    @property
    def uses_receiver(self) -> bool:
        return "receiver_factor" in self.settings.used

    @property
    def premix(self) -> int:
        """Members of a pre-mix group, 1 where there is none."""
        return self.settings.premix if "premix" in self.settings.used else 1

    @property
    def name(self) -> str:
        """The transport and what of VARIED it uses, as short as can be: "pooled_wave position expert, 3 waves"."""
        settings = self.settings
        words = [getattr(settings, name) for name in ("order", "receive", "agreed") if name in settings.used]
        if "slots" in settings.used and settings.slots == "token":
            words.insert(1, "tokens")
        if "waves" in settings.used and settings.waves > 1:
            words.append(f"{settings.waves} waves")
        if self.premix > 1:
            words.append(f"pre-mix {self.premix}")
        return " ".join([settings.transport, *words])

    def at(self, sender: float, receiver: float) -> EPConfig:
        """The settings with these factors."""
        return dataclasses.replace(self.settings, sender_factor=sender, receiver_factor=receiver)

    def check(self, shape: LayerShape) -> None:
        """Raises ConfigError when the policy cannot run on such a layer."""
        if self.shards % self.premix or shape.tokens % self.premix:
            raise ConfigError(
                f"--premix {self.premix}: must divide {self.shards} shards and a shard's {shape.tokens} tokens"
            )


def families(
    transports: Sequence[str], shards: Sequence[int], varied: Mapping[str, Sequence[Any]], base: EPConfig
) -> list[Family]:
    """Every combination, in the order asked for, each once.

    varied: values to try for names of VARIED; one that is left out stays as in `base`. Raises ConfigError for a
    transport that moves no rows, or values that a setting does not allow.
    """
    found: dict[Family, None] = {}
    for count, transport in itertools.product(shards, transports):
        if transport not in TRANSPORTS:
            raise ConfigError(f"--policies {transport}: allowed are {', '.join(TRANSPORTS)}")
        plain = EPConfig(transport=transport)
        names = [name for name in VARIED if name in plain.used]
        choices = [varied.get(name) or [getattr(base, name)] for name in names]
        for values in itertools.product(*choices):
            found[Family(dataclasses.replace(plain, **dict(zip(names, values, strict=True))), count)] = None
    return list(found)
