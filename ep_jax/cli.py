"""The command line of every entry point: `--config`, `--section.key VALUE` for every setting, and `--help`.

Values are typed by `config.load`; nothing here knows what a setting means. Help comes from the settings themselves.
"""

import argparse
import dataclasses
import difflib
import textwrap
from collections.abc import Sequence

from ep_jax.config import Key, RunConfig, keys, known_key, load, sections
from ep_jax.config_files import shipped_configs
from ep_jax.fields import ConfigError, allowed, metavar

_WIDTH = 110
_INDENT = 44


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of one command beside the settings, e.g. Option("run", "DIR", "the run folder to evaluate").

    Without a metavar it is a flag: typed as `--name` alone, and then an empty text among the options.
    """

    name: str
    metavar: str
    doc: str

    @property
    def usage(self) -> str:
        return f"--{self.name} {self.metavar}".rstrip()


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What was typed: the --config value, setting overrides in order, and the command's own options by name."""

    config: str | None
    overrides: tuple[tuple[str, str], ...]
    options: dict[str, str]


_CONFIG = Option("config", "PATH|NAME", "TOML file, or the name of a shipped one; without it the defaults apply")


class CommandParser(argparse.ArgumentParser):
    """The parser of commands that take no run configuration: what is wrong is a ConfigError, one line."""

    def error(self, message: str):
        raise ConfigError(message)


def parse_args(argv: Sequence[str], *, command: str, description: str) -> RunConfig:
    """The configuration of a command line. Raises ConfigError; prints the help and raises SystemExit(0) for --help."""
    arguments = split_args(argv, command=command, description=description)
    return load(arguments.config, arguments.overrides)


def split_args(argv: Sequence[str], *, command: str, description: str, extra: Sequence[Option] = ()) -> Arguments:
    """Splits a command line without reading any file, for commands with options of their own; else as `parse_args`.

    `--name VALUE` and `--name=VALUE` are the same; a value that begins with "--" needs the second form. A flag has no
    value. Names are checked here, values by `load`.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(command, description, extra))
        raise SystemExit(0)
    own = [option.name for option in (_CONFIG, *extra)]
    flags = [option.name for option in extra if not option.metavar]
    overrides, options = [], {}
    rest = list(argv)
    while rest:
        name, value = _take(rest, flags)
        if name in keys():
            overrides.append((name, value))
        elif name not in own:
            _refuse_name(name, value, own)
        elif name in options:
            raise ConfigError(f"--{name} = {value!r}: already given as {options[name]!r}; allowed is once")
        else:
            options[name] = value
    return Arguments(options.pop(_CONFIG.name, None), tuple(overrides), options)


def help_text(command: str, description: str, extra: Sequence[Option] = ()) -> str:
    """The help: usage, the command's own options, then every setting by section; at most 110 columns."""
    shipped = ", ".join(shipped_configs())
    words = [option.usage for option in (_CONFIG, *extra)]
    # Options stay in one piece where the line breaks.
    usage = " ".join(f"[{word}]".replace(" ", "\xa0") for word in (*words, "--section.key VALUE"))
    wrapped = textwrap.wrap(f"usage: {command} {usage}...", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    lines = [
        *(line.replace("\xa0", " ") for line in wrapped),
        "",
        *textwrap.wrap(description, _WIDTH),
        "",
        *_entry("--help", "this text"),
        *_entry("--config PATH|NAME", f"{_CONFIG.doc} (shipped: {shipped})"),
    ]
    for option in extra:
        lines += _entry(option.usage, option.doc)
    section = ""
    for key in keys().values():
        if key.section != section:
            section = key.section
            summary = (sections()[section].__doc__ or "").split("\n")[0]
            lines += ["", f"{section}: {summary}"]
        lines += _entry(f"--{key.name} {metavar(key.hint)}", _meaning(key))
    return "\n".join(lines)


def _take(rest: list[str], flags: Sequence[str]) -> tuple[str, str]:
    """Removes one option from the front of `rest`: its name without dashes, and its value, empty for a flag."""
    word = rest.pop(0)
    if not word.startswith("--") or word == "--":
        raise ConfigError(f"{word!r}: not an option; allowed is --section.key VALUE, or --help")
    name, equals, value = word.removeprefix("--").partition("=")
    if name in flags:
        if equals:
            raise ConfigError(f"--{name} = {value!r}: takes no value; allowed is --{name}")
        return name, ""
    if not equals:
        if not rest or rest[0].startswith("--"):
            raise ConfigError(f"--{name}: has no value; allowed is --{name} VALUE")
        value = rest.pop(0)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} = {value!a}: allowed is UTF-8 text") from None
    return name, value


def _refuse_name(name: str, value: str, own: Sequence[str]) -> None:
    close = difflib.get_close_matches(name, own, n=1, cutoff=0.75)
    if close:
        raise ConfigError(f"{name} = {value!r}: no such option; did you mean --{close[0]}?")
    known_key(name, value)


def _entry(left: str, text: str) -> list[str]:
    """One help entry: `left` in its column, `text` wrapped beside it, below it where `left` is too long."""
    lines = textwrap.wrap(text, _WIDTH - _INDENT, break_on_hyphens=False)
    left = "  " + left
    if len(left) >= _INDENT:
        return [left, *(" " * _INDENT + line for line in lines)]
    return [f"{left:{_INDENT}}{lines[0]}", *(" " * _INDENT + line for line in lines[1:])]


def _meaning(key: Key) -> str:
    """Meaning, unit, default and what is allowed, e.g. "optimizer steps (steps; default 400; at least 1)"."""
    default = str(key.default).lower() if key.default in (None, True, False) else repr(key.default)
    notes = [key.metadata["unit"], f"default {default}", allowed(key.metadata)]
    return f"{key.metadata['doc']} ({'; '.join(note for note in notes if note)})"
