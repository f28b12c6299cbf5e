"""Whether a configuration fits one GPU, the nearest settings that do, and the largest model that fits.

`fits` compares `memory(...).peak` with the hardware's usable bytes. `nearest` tries, in this order, changes of one
setting (replicas turned into fsdp count as one), then remat together with accumulation, then fewer layers, then fewer
layers in the frugal configuration; a change is offered only if the whole configuration stays legal. `largest` adds or
removes whole blocks of layers and changes nothing else. `frugal` is the same model with remat full and one row on a GPU
and microbatch: what it cannot do, no setting of time against memory can.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from ep_jax.config import RunConfig, check_run
from ep_jax.fields import ConfigError
from ep_jax.model.config import REMAT_POLICIES
from ep_jax.planning.hardware import Hardware
from ep_jax.planning.memory import memory
from ep_jax.planning.sizes import Sizes

Change = tuple[str, Any]  # dotted key, value
MOST_BLOCKS = 2**14


@dataclasses.dataclass(frozen=True)
class Advice:
    """Changes that make the configuration fit, and what a GPU then needs."""

    changes: tuple[Change, ...]
    peak_bytes: int

    @property
    def text(self) -> str:
        return " ".join(f"--{key} {value}" for key, value in self.changes)


def fits(config: RunConfig, hardware: Hardware) -> bool:
    """Whether the estimated peak is within what a GPU offers."""
    return memory(Sizes(config)).peak <= hardware.usable_bytes


def nearest(config: RunConfig, hardware: Hardware, most: int = 4) -> list[Advice]:
    """Up to `most` changes that fit, fewest settings first; empty where it fits as it is, and where nothing does."""
    if fits(config, hardware):
        return []
    for round_of in (_one_setting, _two_settings, _fewer_layers, _frugal_fewer_layers):
        found = [advice for changes in round_of(config) if (advice := _try(config, changes, hardware))]
        first_of_key = {tuple(key for key, _ in advice.changes): advice for advice in reversed(found)}
        if first_of_key:
            return sorted(first_of_key.values(), key=found.index)[:most]
    return []


def largest(config: RunConfig, hardware: Hardware) -> int:
    """Most layers that fit, in whole blocks; 0 when not even one block does."""
    low, high = 0, MOST_BLOCKS
    while low < high:
        middle = (low + high + 1) // 2
        if fits(_with(config, [("model.num_layers", middle * config.model.global_every)]), hardware):
            low = middle
        else:
            high = middle - 1
    return low * config.model.global_every


def changed(config: RunConfig, changes: tuple[Change, ...]) -> RunConfig:
    """The configuration with some settings replaced, checked. Raises ConfigError."""
    new = _with(config, changes)
    check_run(new)
    return new


def frugal(config: RunConfig) -> RunConfig:
    """The least memory at this mesh: everything recomputed, one row on each GPU at a time."""
    return _with(config, _frugal_changes(config))


def _frugal_changes(config: RunConfig) -> tuple[Change, ...]:
    rows = config.train.sequences_per_step // config.mesh.size
    wanted = (("model.remat", "full"), ("train.accumulation", rows), ("model.loss_chunk_tokens", 4096))
    return tuple((key, value) for key, value in wanted if _value(config, key) != value)


def _value(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _with(config: RunConfig, changes: Iterable[Change]) -> RunConfig:
    for key, value in changes:
        section, name = key.split(".")
        part = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: part})
    return config


def _try(config: RunConfig, changes: tuple[Change, ...], hardware: Hardware) -> Advice | None:
    try:
        new = changed(config, changes)
    except ConfigError:
        return None
    peak = memory(Sizes(new)).peak
    return Advice(changes, peak) if peak <= hardware.usable_bytes else None


def _accumulations(config: RunConfig) -> Iterator[int]:
    """More microbatches, down to one row on each GPU."""
    rows = config.train.sequences_per_step // config.mesh.size
    yield from (n for n in range(config.train.accumulation + 1, rows + 1) if rows % n == 0)


def _one_setting(config: RunConfig) -> Iterator[tuple[Change, ...]]:
    policies = REMAT_POLICIES
    for policy in policies[policies.index(config.model.remat) + 1 :]:
        yield (("model.remat", policy),)
    for chunk in (16384, 8192, 4096):
        if not config.model.loss_chunk_tokens or chunk < config.model.loss_chunk_tokens:
            yield (("model.loss_chunk_tokens", chunk),)
    yield from ((("train.accumulation", n),) for n in _accumulations(config))
    if config.optimizer.name == "adamw":
        yield (("optimizer.name", "muon"),)
    if config.optimizer.name == "muon" and config.optimizer.muon_dtype == "float32":
        yield (("optimizer.muon_dtype", "bfloat16"),)
    if config.model.compute_dtype == "float32":
        yield (("model.compute_dtype", "bfloat16"),)
    for replica in range(config.mesh.replica - 1, 0, -1):
        if config.mesh.replica % replica == 0:
            yield ("mesh.replica", replica), ("mesh.fsdp", config.mesh.fsdp * config.mesh.replica // replica)


def _two_settings(config: RunConfig) -> Iterator[tuple[Change, ...]]:
    for policy in REMAT_POLICIES[1:]:
        if policy != config.model.remat:
            yield from ((("model.remat", policy), ("train.accumulation", n)) for n in _accumulations(config))


def _fewer_layers(config: RunConfig) -> Iterator[tuple[Change, ...]]:
    every = config.model.global_every
    yield from ((("model.num_layers", n),) for n in range(config.model.num_layers - every, 0, -every))


def _frugal_fewer_layers(config: RunConfig) -> Iterator[tuple[Change, ...]]:
    yield from ((*_frugal_changes(config), *layers) for layers in _fewer_layers(config))
