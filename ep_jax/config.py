"""The run configuration: every component's settings in one frozen `RunConfig`, read from TOML and strict.

`load` reads a file and overrides, `to_toml` writes what `load` reads back exactly, `check_run` holds the rules that
span sections. Rules of one section live in its dataclass; files are found and parsed in `config_files.py`, the command
line and its help are in `cli.py`, the mesh is resolved against the devices in `mesh.py`. Starts no JAX backend.
"""

import dataclasses
import difflib
import functools
import json
import math
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ep_jax.checkpoint import CheckpointConfig
from ep_jax.config_files import read_toml, toml_value
from ep_jax.data.config import DataConfig
from ep_jax.ep.settings import EPConfig
from ep_jax.fields import ConfigError, check, convert, convert_text, setting
from ep_jax.mesh import AXES, MeshConfig, resolve
from ep_jax.metrics import LogConfig
from ep_jax.model.config import ModelConfig, RouterConfig
from ep_jax.optimizer import OptimizerConfig
from ep_jax.profiling import ProfileConfig
from ep_jax.traces.config import TraceConfig

CONFIG_FILE = "config.toml"  # the resolved configuration in a run folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, on how many sequences a step, and when to evaluate."""

    SECTION: ClassVar[str] = "train"

    steps: int = setting(400, at_least=1, unit="steps", doc="optimizer steps of the whole run")
    seed: int = setting(0, at_least=0, at_most=2**31 - 1, doc="parameters and data order are functions of it")
    sequences_per_step: int = setting(
        32, at_least=1, unit="sequences", doc="packed rows of one optimizer step, over all devices and microbatches"
    )
    accumulation: int = setting(
        1,
        at_least=0,
        unit="microbatches",
        doc="a step's rows are passed in this many parts to save memory; 0 = as few as sequences_per_device allows",
    )
    sequences_per_device: int = setting(
        0, at_least=0, unit="sequences", doc="most packed rows that a device has at a time, where accumulation = 0"
    )
    eval_every: int = setting(0, at_least=0, unit="steps", doc="held-out loss every so often; 0 = only at the end")
    eval_sequences: int = setting(64, at_least=1, unit="sequences", doc="held-out packed rows of one evaluation")
    hang_timeout_s: int = setting(
        0,
        at_least=0,
        unit="seconds",
        doc="a step, evaluation or save that takes longer ends the process with exit code 8 and the stacks of all "
        "threads; must be more than a checkpoint takes to write. Not limited: the first step and the first evaluation, "
        "which compile, and the last write. 0 = wait forever",
    )
    compilation_cache: str = setting(
        "", doc="folder where compiled programs are kept for the next start; empty = as JAX_COMPILATION_CACHE_DIR says"
    )

    def __post_init__(self):
        check(self)
        if not self.accumulation and not self.sequences_per_device:
            raise ConfigError("train.accumulation = 0: needs train.sequences_per_device of at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run; the resolved one is written into its folder."""

    SECTION: ClassVar[str] = ""

    run_dir: str = setting("runs/default", doc="folder of the run: configuration, metrics, checkpoints")
    resume: str = setting(
        "auto", doc="auto = from run_dir's newest checkpoint if any, never, or the path of a checkpoint or run folder"
    )
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    router: RouterConfig = dataclasses.field(default_factory=RouterConfig)
    ep: EPConfig = dataclasses.field(default_factory=EPConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    profile: ProfileConfig = dataclasses.field(default_factory=ProfileConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    trace: TraceConfig = dataclasses.field(default_factory=TraceConfig)

    def __post_init__(self):
        check(self)
        if not self.run_dir:
            raise ConfigError("run_dir = '': allowed is the path of a folder")
        if not self.resume:
            raise ConfigError("resume = '': allowed is auto, never, or the path of a checkpoint or run folder")

    @property
    def folder(self) -> Path:
        """The run folder as a path; a leading ~ is the home folder."""
        return Path(os.path.expanduser(self.run_dir))


@dataclasses.dataclass(frozen=True)
class Key:
    """One setting as users name it: dotted name, section, declared type, default and the metadata of `setting`."""

    name: str
    section: str
    hint: Any
    default: Any
    metadata: Mapping[str, Any]

    @property
    def leaf(self) -> str:
        """The last part of the name, the field of the section's dataclass."""
        return self.name.rpartition(".")[2]


@functools.cache
def sections() -> dict[str, Any]:
    """Section name -> its dataclass, in the order of the file and of the help."""
    hints = typing.get_type_hints(RunConfig)
    return {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}


@functools.cache
def keys() -> dict[str, Key]:
    """Dotted name -> Key of every setting that a file or the command line may give."""
    found = {}
    for section, config_class in {"": RunConfig, **sections()}.items():
        hints = typing.get_type_hints(config_class)
        for field in dataclasses.fields(config_class):
            if section or field.name not in sections():
                name = f"{section}.{field.name}".removeprefix(".")
                found[name] = Key(name, section, hints[field.name], field.default, field.metadata)
    return found


def load(config_path: str | None, overrides: Sequence[tuple[str, str]] = ()) -> RunConfig:
    """Reads a configuration: defaults, then the file (path or shipped name; None for none), then the overrides.

    overrides: (dotted name, text) pairs as typed on the command line, each name at most once.
    Raises ConfigError for an unreadable file, an unknown, misplaced, repeated or mistyped key, a value out of bounds.
    """
    values = {}
    for name, value in _leaves(read_toml(config_path) if config_path is not None else {}):
        values[name] = convert(value, known_key(name, value).hint)
    texts = {}
    for name, text in overrides:
        if name in texts:
            raise ConfigError(f"{name} = {text!r}: already given as {texts[name]!r}; allowed is once")
        texts[name] = text
        values[name] = convert_text(text, known_key(name, text).hint)
    return _build(values)


def known_key(name: str, value: Any) -> Key:
    """The key of that dotted name; raises ConfigError naming the nearest one."""
    if name in keys():
        return keys()[name]
    section = name.rpartition(".")[0]
    if name in sections():
        members = ", ".join(key.name for key in keys().values() if key.section == name)
        raise ConfigError(f"{name} = {value!r}: is a section; its keys are {members}")
    if section and section not in sections() and '"' not in name:
        reason = f"no section {section} (sections: {', '.join(sections())})"
    else:
        reason = "no such key"
    raise ConfigError(f"{name} = {value!r}: {reason}; did you mean {nearest_key(name)}?")


def nearest_key(name: str) -> str:
    """The dotted name most like `name`; the last part counts most, so that a misplaced key is found; lr is known."""
    section, _, leaf = name.lower().strip('"').rpartition(".")

    def likeness(key: Key) -> float:
        words, known_words = leaf.split("_"), key.leaf.split("_")
        shared_words = 2 * len(set(words) & set(known_words)) / (len(words) + len(known_words))
        initials = "".join(word[0] for word in known_words)
        same_leaf = 1.0 if leaf in (key.leaf, initials) else difflib.SequenceMatcher(None, leaf, key.leaf).ratio()
        return same_leaf + 0.5 * shared_words + 0.25 * difflib.SequenceMatcher(None, section, key.section).ratio()

    return max(keys().values(), key=likeness).name


def to_toml(config: RunConfig) -> str:
    """The whole configuration as TOML, each key with its meaning; `load` reads back an equal one."""
    lines = ["# Resolved configuration of an ep_jax run. It can be given to --config again."]
    section = ""
    for key in keys().values():
        if key.section != section:
            section = key.section
            lines += ["", f"[{section}]"]
        value = getattr(getattr(config, section) if section else config, key.leaf)
        assignment = f"# {key.leaf}: left out" if value is None else f"{key.leaf} = {toml_value(value)}"
        unit = f" [{key.metadata['unit']}]" if key.metadata["unit"] else ""
        lines.append(f"{assignment}  # {key.metadata['doc']}{unit}")
    return "\n".join(lines) + "\n"


def write_config(config: RunConfig) -> Path:
    """Writes `to_toml(config)` into the run folder, made if needed, never half a file; returns the path."""
    path = config.folder / CONFIG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".toml.unfinished")
    unfinished.write_text(to_toml(config), encoding="utf-8")
    os.replace(unfinished, path)
    return path


def placed(config: RunConfig, num_devices: int | None) -> RunConfig:
    """The configuration on so many devices (None: not known): an axis of -1 and an accumulation of 0 become numbers.

    Raises ConfigError as `mesh.resolve` does. A batch that does not divide over the devices is left to `check_run`.
    """
    mesh, train = resolve(config.mesh, num_devices), config.train
    config = dataclasses.replace(config, mesh=mesh)
    if train.accumulation:
        return config
    rows, at_a_time = train.sequences_per_step // _shards(config), train.sequences_per_device * mesh.size
    parts = next((n for n in range(1, rows + 1) if rows % n == 0 and train.sequences_per_step <= n * at_a_time), rows)
    train = dataclasses.replace(train, accumulation=max(parts, 1), sequences_per_device=0)
    return dataclasses.replace(config, train=train)


def _shards(config: RunConfig) -> int:
    """What a microbatch is dealt out to: the devices, or more where ep.emulated_shards are more than they."""
    mesh = config.mesh
    return mesh.replica * mesh.fsdp * (config.ep.emulated_shards if config.ep.emulates else mesh.ep)


def check_run(config: RunConfig) -> None:
    """Checks the rules that span sections, before anything is compiled, of a configuration that is `placed`.

    Raises ConfigError with both numbers. Nothing is ever rounded: a batch or a width that does not divide is refused.
    """
    train, mesh, model, router = config.train, config.mesh, config.model, config.router
    if -1 in mesh.shape:
        raise ConfigError(f"mesh.{AXES[mesh.shape.index(-1)]} = -1: must be resolved against the devices first")
    if not train.accumulation:
        raise ConfigError("train.accumulation = 0: must be resolved against the devices first")
    devices = math.prod(mesh.shape)
    shards = mesh.fsdp * mesh.ep
    dealt_to = _shards(config)
    group, group_name, places = mesh.ep, "mesh.ep", f"{devices} devices, replica x fsdp x ep"
    if config.ep.emulates:
        group, group_name = config.ep.emulated_shards, "ep.emulated_shards"
        places = f"{dealt_to} shards, replica x fsdp x ep.emulated_shards"
        _require_multiple("ep.emulated_shards", group, mesh.ep, "mesh.ep")

    _require_multiple("router.num_experts", router.num_experts, group, group_name)
    _require_multiple(
        "train.sequences_per_step",
        train.sequences_per_step,
        train.accumulation * dealt_to,
        f"train.accumulation = {train.accumulation} times {places}",
    )
    _require_multiple("train.eval_sequences", train.eval_sequences, devices, "devices, replica x fsdp x ep")
    if "premix" in config.ep.used and config.ep.premix > 1:
        rows = train.sequences_per_step // (train.accumulation * dealt_to)
        tokens = rows * config.data.sequence_length
        for name, value in {group_name: group, "the tokens of a shard": tokens}.items():
            if value % config.ep.premix:
                raise ConfigError(f"ep.premix = {config.ep.premix}: must divide {name} = {value}")
    if model.window >= config.data.sequence_length:
        raise ConfigError(
            f"model.window = {model.window}: must be below data.sequence_length = {config.data.sequence_length}; "
            "0 switches it off"
        )

    split_widths = {"model.model_dim": model.model_dim}
    split_widths["model.num_heads x model.head_dim"] = model.num_heads * model.head_dim
    if model.latent_dim != model.model_dim:
        split_widths["model.latent_dim"] = model.latent_dim
    if model.num_shared_experts:
        split_widths["model.shared_hidden_dim"] = model.shared_hidden_dim
    for name, width in split_widths.items():
        _require_multiple(name, width, shards, "mesh.fsdp x mesh.ep, which split it")
    for name, width in {"latent_dim": model.latent_dim, "expert_hidden_dim": model.expert_hidden_dim}.items():
        _require_multiple(f"model.{name}", width, mesh.fsdp, "mesh.fsdp, which splits it")


def _require_multiple(name: str, value: int, base: int, meaning: str) -> None:
    if value % base:
        below = value // base * base
        near = f"{below} and {below + base}" if below else f"{base}"
        raise ConfigError(f"{name} = {value}: must be a multiple of {base} ({meaning}); nearest: {near}")


def _build(values: Mapping[str, Any]) -> RunConfig:
    arguments = {section: {} for section in ("", *sections())}
    for name, value in values.items():
        arguments[keys()[name].section][keys()[name].leaf] = value
    parts = {section: config_class(**arguments[section]) for section, config_class in sections().items()}
    return RunConfig(**arguments[""], **parts)


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a TOML table; a quoted name with a dot stays quoted, hence unknown."""
    for part, value in table.items():
        name = prefix + (json.dumps(part) if "." in part else part)
        if isinstance(value, dict) and name not in keys() and (value or name in sections()):
            yield from _leaves(value, name + ".")
        else:
            yield name, value
