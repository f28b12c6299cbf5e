"""Configuration files: finding, reading and shipping TOML, with every parser complaint on one line.

What the keys mean is in `config.py`; this file knows tables and values only.
"""

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from ep_jax.fields import ConfigError


def read_toml(name: str) -> dict[str, Any]:
    """The table of a file, given as a path or as the name of a shipped configuration ("tiny", "configs/tiny.toml").

    Raises ConfigError naming `name` and, for bad TOML, the line.
    """
    file = _find(name)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config = {name!r}: cannot be read as UTF-8 text: {error}") from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: a number of 5000 digits
        raise ConfigError(f"--config = {name!r}: {_explain(str(error), text)}") from None


def shipped_configs() -> dict[str, Path]:
    """Name without .toml -> path of the configurations that come with ep_jax.

    A wheel holds them inside the package, a checkout (also one installed with `pip install -e`) beside it.
    """
    package = Path(__file__).parent
    folder = next((path for path in (package / "configs", package.parent / "configs") if path.is_dir()), package)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def toml_value(value: Any) -> str:
    """One setting's value as TOML that reads back equal: floats by repr, text quoted, tuples as arrays."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(element) for element in value) + "]"
    return repr(value)


def _find(name: str) -> Path:
    path = Path(os.path.expanduser(name))
    if path.is_file():
        return path
    shipped = shipped_configs()
    bare = name.removeprefix("configs/").removesuffix(".toml")
    if bare in shipped:
        return shipped[bare]
    kind = "is a folder" if path.is_dir() else "no such file"
    raise ConfigError(f"--config = {name!r}: {kind}; allowed is a TOML file or a shipped name: {', '.join(shipped)}")


def _explain(message: str, text: str) -> str:
    """A parser message as "line n, 'the line': reason", with repeated keys and bare words in plain words."""
    place = re.search(r" \(at line (\d+), column \d+\)$", message)
    reason = message[: place.start()] if place else message
    if "overwrite" in reason or "twice" in reason:
        reason = "this key or section is given twice; allowed is once"
    elif reason == "Invalid value":
        reason = "not a TOML value; text is written in quotes, booleans are true and false"
    number = int(place[1]) if place else text.rstrip().count("\n") + 1
    line = text.split("\n")[number - 1].strip()
    return f"line {number}, {line!r}: {reason}"
