"""A sweep: one TOML file that names a base configuration and values per key, read into validated members.

    config = "tiny"                    # base: a path, or the name of a shipped configuration
    out = "runs/sweeps/mine"           # one folder a member below it; default runs/sweeps/ and the file's name
    [set]                              # for every member
    train.steps = 60
    [grid]                             # every combination, the last key fastest; or a list of [[members]] instead
    ep.sender_factor = [1.0, 1.25]
    ep.receiver_factor = [1.0, 1.25]

A member that is refused (a factor of -1) stays in the list with its reason, so that the others can run. Starts no JAX
backend and no process: `tools/sweep.py` runs members, `tools/sweep_results.py` shows what came of them.
"""

import collections
import dataclasses
import difflib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ep_jax.checkpoint import CHECKPOINTS, steps_found
from ep_jax.config import RunConfig, check_run, known_key, load, placed, to_toml
from ep_jax.config_files import read_toml
from ep_jax.fields import ConfigError, convert
from ep_jax.report import SUMMARY_FILE

MEMBER_FILE = "member.toml"  # in a member's folder: what the sweep asks for; config.toml is written by the run itself
PARTS = ("config", "out", "set", "grid", "members")
RESERVED = ("run_dir", "resume")  # every member starts at step 0 in a folder of its own, or goes on in it
LONGEST_NAME = 120

NEW, HALF_DONE, FINISHED, REFUSED = "new", "half done", "finished", "refused"


@dataclasses.dataclass(frozen=True)
class Member:
    """One run of a sweep. `config` is None where `refusal` says why its values are not allowed."""

    name: str  # also its folder's: sender_factor=1.0,receiver_factor=1.25
    values: dict[str, Any]  # dotted key -> value, converted to the key's type
    folder: Path
    config: RunConfig | None
    refusal: str = ""

    @property
    def file(self) -> Path:
        return self.folder / MEMBER_FILE


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The members in their order, and the folder that holds theirs."""

    name: str
    out: Path
    members: tuple[Member, ...]

    @property
    def keys(self) -> list[str]:
        """The dotted keys that members set, in the order of the file."""
        return list(dict.fromkeys(key for member in self.members for key in member.values))


def read_sweep(path: str) -> Sweep:
    """Reads a sweep and validates every member. Raises ConfigError for the file; refused members are in the result."""
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise ConfigError(f"{path}: no such file; allowed is a sweep's TOML file, such as configs/sweeps/capacity.toml")
    try:
        table = read_toml(str(file))
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("--config = ")) from None
    _check_parts(table)
    base = load(table.get("config"))
    if base.resume != "auto":
        raise ConfigError(f"resume = {base.resume!r}: allowed in a sweep's base is auto, members start at step 0")
    base = with_values(base, _free_values(table.get("set", {})))
    out = Path(os.path.expanduser(table.get("out", f"runs/sweeps/{file.stem}")))
    members = tuple(_member(base, values, out) for values in _all_values(table))
    names = collections.Counter(member.name for member in members)
    for name, times in names.items():
        if times > 1:
            raise ConfigError(f"{path}: member {name} is given {times} times; allowed is once")
    return Sweep(file.stem, out, members)


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The configuration with some dotted keys changed. Raises ConfigError for an unknown key or a refused value."""
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        key = known_key(name, value)
        by_section.setdefault(key.section, {})[key.leaf] = convert(value, key.hint)
    own = by_section.pop("", {})
    parts = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in by_section.items()}
    return dataclasses.replace(config, **own, **parts)


def state_of(member: Member) -> str:
    """NEW, HALF_DONE (a checkpoint to resume from), FINISHED or REFUSED, as the member's folder says.

    Raises ConfigError when the folder holds a run of another configuration: nothing is overwritten or resumed from it.
    """
    if member.config is None:
        return REFUSED
    if not member.folder.exists():
        return NEW
    if not member.file.is_file():
        raise ConfigError(f"{member.folder}: is not of this sweep, it has no {MEMBER_FILE}; allowed is another `out`")
    before, now = _flat(load(str(member.file))), _flat(member.config)
    for name, value in now.items():
        if value != before[name] and name != "run_dir":
            raise ConfigError(
                f"{member.folder}: was begun with {name} = {before[name]!r}, now it is {value!r}; allowed are another "
                "`out`, the same settings, or to remove the folder"
            )
    if (member.folder / SUMMARY_FILE).exists():
        return FINISHED
    return HALF_DONE if steps_found(member.folder / CHECKPOINTS) else NEW


def write_member(member: Member) -> None:
    """Makes the member's folder with its configuration, whole or not at all."""
    assert member.config, "refused members have no folder"
    member.folder.mkdir(parents=True, exist_ok=True)
    if not member.file.exists():
        replace_text(member.file, to_toml(member.config))


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    scratch = path.with_name(path.name + ".unfinished")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def _check_parts(table: Mapping[str, Any]) -> None:
    """Refuses what is no part of a sweep file, and parts of the wrong kind."""
    for name, value in table.items():
        if name not in PARTS:
            close = difflib.get_close_matches(name, PARTS, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]}?" if close else f"allowed are {', '.join(PARTS)}; settings stand in [set]"
            raise ConfigError(f"{name} = {value!r}: no part of a sweep; {hint}")
    for name in ("config", "out"):
        if name in table and (not isinstance(table[name], str) or not table[name]):
            raise ConfigError(f"{name} = {table[name]!r}: expected text, a path")
    for name in ("set", "grid"):
        if not isinstance(table.get(name, {}), dict):
            raise ConfigError(f"{name} = {table[name]!r}: expected a table, [{name}]")
    members = table.get("members", [])
    if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
        raise ConfigError(f"members = {members!r}: expected tables, [[members]]")
    if bool(table.get("grid")) == bool(members):
        raise ConfigError("grid and members: allowed is one of them, and it is not empty")


def _all_values(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The values of every member. Raises ConfigError for a key that no configuration has."""
    if members := table.get("members"):
        return [_free_values(member) for member in members]
    grid = _free_values(table["grid"])
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{name} = {values!r}: expected a list of values in [grid]")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _free_values(table: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of a table, nested or with quoted dotted names. Raises ConfigError for other keys."""
    values: dict[str, Any] = {}
    for name, value in _leaves(table):
        if name in RESERVED:
            raise ConfigError(f"{name} = {value!r}: set by the sweep, which gives each member a folder of its own")
        known_key(name, value)
        if name in values:
            raise ConfigError(f"{name} = {value!r}: already given as {values[name]!r}; allowed is once")
        values[name] = value
    return values


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for part, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{part}.")
        else:
            yield prefix + part, value


def _member(base: RunConfig, values: Mapping[str, Any], out: Path) -> Member:
    typed = {name: convert(value, known_key(name, value).hint) for name, value in values.items()}
    name = _member_name(typed)
    folder = out / name
    try:
        config = dataclasses.replace(with_values(base, typed), run_dir=str(folder))
        if -1 not in config.mesh.shape:  # else the run itself checks, once it knows the devices
            check_run(placed(config, None))
    except ConfigError as error:
        return Member(name, typed, folder, None, str(error))
    return Member(name, typed, folder, config)


def _member_name(values: Mapping[str, Any]) -> str:
    """Values as the name of a folder: last parts of the keys, plain characters only, a digest where that is long."""
    parts = (f"{name.rpartition('.')[2]}={_word(value)}" for name, value in values.items())
    name = ",".join(parts) or "base"
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return f"{name[: LONGEST_NAME - 13]}-{digest}"


def _word(value: Any) -> str:
    return re.sub(r"[^\w.+-]+", "_", str(value).lower() if isinstance(value, bool) else str(value))


def _flat(config: RunConfig) -> dict[str, Any]:
    """Dotted key -> value of a whole configuration."""
    return dict(_leaves(dataclasses.asdict(config)))
