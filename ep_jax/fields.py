"""Fields of the frozen configuration dataclasses: default, meaning, unit and bounds in one place.

Every component declares its settings with `setting(...)` in a frozen dataclass beside its code and calls `check(self)`
in `__post_init__`. `ep_jax.config` assembles them, reads TOML and the command line and prints `--help` from the same
metadata. This file knows nothing of files, of JAX or of any component.
"""

import dataclasses
import math
import tomllib
import types
import typing
from typing import Any

_EXACT = 2**53  # integers up to here are exact as floats


class ConfigError(ValueError):
    """A refused configuration, data set or call: one line that names key, value and what is allowed. Exit code 2."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


def setting(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    unit: str = "",
    choices: tuple[Any, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """Declares one setting: its default (required when left out), meaning, unit and allowed values."""
    metadata = {"doc": doc, "unit": unit, "choices": choices, "at_least": at_least, "above": above, "at_most": at_most}
    return dataclasses.field(default=default, metadata=metadata)


def check(config: Any) -> None:
    """Checks every field of a config dataclass against its declared type and bounds.

    The class attribute `SECTION` is the prefix of its keys ("" for the top level). Nested config dataclasses have
    checked themselves. Raises ConfigError naming the key, the value and what is allowed.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[field.name]):
            continue
        key, value = key_of(config, field.name), getattr(config, field.name)
        if not _has_type(value, hints[field.name]):
            raise ConfigError(f"{key} = {value!r}: expected {type_name(hints[field.name])}")
        if not _within_bounds(value, field.metadata):
            raise ConfigError(f"{key} = {value!r}: allowed is {allowed(field.metadata)}")


def key_of(config: Any, name: str) -> str:
    """The dotted key of a field as users type it, e.g. "ep.sender_factor"."""
    section = getattr(config, "SECTION", "")
    return f"{section}.{name}" if section else name


def allowed(metadata: typing.Mapping[str, Any]) -> str:
    """The bounds of a field in words; empty when there are none."""
    if metadata.get("choices"):
        return "one of " + ", ".join(str(choice) for choice in metadata["choices"])
    parts = []
    if metadata.get("at_least") is not None:
        parts.append(f"at least {metadata['at_least']}")
    if metadata.get("above") is not None:
        parts.append(f"above {metadata['above']}")
    if metadata.get("at_most") is not None:
        parts.append(f"at most {metadata['at_most']}")
    return ", ".join(parts)


def type_name(hint: Any) -> str:
    """A type as users would say it: "integer", "number", "true or false", "text", "list of text"."""
    simple = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    if hint in simple:
        return simple[hint]
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        plural = {int: "integers", float: "numbers", bool: "true/false values", str: "text"}
        return f"a list of {plural.get(item, item)}"
    if _is_optional(hint):
        return f"{type_name(_optional_item(hint))} (or left out)"
    return str(hint)


def metavar(hint: Any) -> str:
    """A type as the help shows it beside an option: INTEGER, NUMBER, true|false, TEXT, LIST."""
    if _is_optional(hint):
        return f"{metavar(_optional_item(hint))}|none"
    return {int: "INTEGER", float: "NUMBER", bool: "true|false", str: "TEXT"}.get(hint, "LIST")


def convert(value: Any, hint: Any) -> Any:
    """A value read from TOML as the declared type where nothing is lost: 5 -> 5.0, 1e3 -> 1000, list -> tuple.

    Anything else is returned as it is and refused by `check` with its key: "1.25" for a number, 8.5 for an integer.
    """
    if _is_optional(hint):
        return convert(value, _optional_item(hint))
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(convert(element, typing.get_args(hint)[0]) for element in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _EXACT:
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        return int(value)
    return value


def convert_text(text: str, hint: Any) -> Any:
    """A value typed on the command line as the declared type; text that does not fit stays text, for `check` to refuse.

    Booleans are true or false, lists are TOML ("[1, 2]") or separated by commas, "none" empties an optional field.
    """
    if _is_optional(hint):
        return None if text == "none" else convert_text(text, _optional_item(hint))
    if typing.get_origin(hint) is tuple:
        return _convert_list(text, hint)
    if hint is bool:
        return {"true": True, "false": False}.get(text, text)
    if hint in (int, float):
        for number in (int, float):
            try:
                return convert(number(text), hint)
            except ValueError:
                pass
    return text


def _convert_list(text: str, hint: Any) -> Any:
    if text.lstrip().startswith("["):
        try:
            table = tomllib.loads(f"list = {text}")
        except tomllib.TOMLDecodeError:
            return text
        return convert(table["list"], hint) if len(table) == 1 else text
    parts = [part.strip() for part in text.removesuffix(",").split(",")] if text.strip() else []
    return tuple(convert_text(part, typing.get_args(hint)[0]) for part in parts)


def _has_type(value: Any, hint: Any) -> bool:
    if _is_optional(hint):
        return value is None or _has_type(value, _optional_item(hint))
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return isinstance(value, tuple) and all(_has_type(element, item) for element in value)
    if hint is float:
        return isinstance(value, float) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _within_bounds(value: Any, metadata: typing.Mapping[str, Any]) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    for element in values:
        if element is None:
            continue
        if metadata.get("choices") and element not in metadata["choices"]:
            return False
        if metadata.get("at_least") is not None and element < metadata["at_least"]:
            return False
        if metadata.get("above") is not None and element <= metadata["above"]:
            return False
        if metadata.get("at_most") is not None and element > metadata["at_most"]:
            return False
    return True


def _is_optional(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)


def _optional_item(hint: Any) -> Any:
    return next(item for item in typing.get_args(hint) if item is not type(None))
