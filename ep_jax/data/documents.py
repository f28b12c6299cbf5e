"""Documents of a text source, one after the other, in an order that no file system decides.

| source | documents | order |
|---|---|---|
| stdlib | each .py file of the running Python's standard library, its tests included, installed packages not | path |
| text | each file of a folder (recursive, hidden names left out) or of a glob (`**` allowed), or one file | path |
| jsonl | each line of the files found in the same way (folders: *.jsonl), one named field of it | path, line |

A document is UTF-8 text, kept byte for byte. What cannot be one is skipped and counted by reason: `empty`,
`undecodable` (not UTF-8), `unreadable` (the file cannot be opened), `not_json`, `missing_field` (absent or not text).
Blank lines of a JSON-lines file are no documents and not counted. This file tokenises and caches nothing.
"""

import collections
import difflib
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ep_jax.data.config import DataConfig
from ep_jax.fields import ConfigError

INSTALLED_PACKAGES = ("site-packages", "dist-packages")


class Scan(NamedTuple):
    """What one pass over a source found."""

    fingerprint: str  # hex; changes with any document and with their order
    hashes: np.ndarray  # uint64 [documents], of each document's content
    skipped: dict[str, int]  # reason -> count


def read_documents(config: DataConfig, skipped: collections.Counter) -> Iterator[bytes]:
    """Yields each document's UTF-8 content; counts what it leaves out in `skipped`.

    Raises ConfigError when the source has no files or no document at all.
    """
    paths = _stdlib_files() if config.source == "stdlib" else _files(config.path, config.source)
    num_documents = 0
    fields: list[str] = []
    for path in paths:
        for content in (
            _json_lines(path, config, skipped, fields) if config.source == "jsonl" else _whole(path, skipped)
        ):
            if _acceptable(content, skipped):
                num_documents += 1
                yield content
    if not num_documents:
        where = f"data.path = '{config.path}'" if config.source != "stdlib" else "data.source = 'stdlib'"
        near = difflib.get_close_matches(config.jsonl_field, fields, n=1) or fields[:1]
        hint = f"; nearest field is {near[0]!r}" if near and skipped["missing_field"] else ""
        raise ConfigError(
            f"{where}: 0 documents in {len(paths)} files, needed at least 2; skipped: {skipped_text(skipped)}{hint}"
        )


def scan(config: DataConfig) -> Scan:
    """Reads and hashes every document once. Raises ConfigError as `read_documents` does."""
    skipped: collections.Counter = collections.Counter()
    total, hashes = hashlib.blake2b(digest_size=16), []
    for content in read_documents(config, skipped):
        digest = document_digest(content)
        total.update(digest)
        hashes.append(digest_hash(digest))
    return Scan(total.hexdigest(), np.array(hashes, np.uint64), dict(skipped))


def document_digest(content: bytes) -> bytes:
    """16 bytes that stand for a document's content."""
    return hashlib.blake2b(content, digest_size=16).digest()


def digest_hash(digest: bytes) -> int:
    """The number in [0, 2^64) that decides on which side of the held-out split a document falls."""
    return int.from_bytes(digest[:8], "little")


def skipped_text(skipped: dict[str, int]) -> str:
    """The skip counts in words, e.g. "27 empty, 3 undecodable"; "none"."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()) if count) or "none"


def _acceptable(content: bytes, skipped: collections.Counter) -> bool:
    if not content:
        skipped["empty"] += 1
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        skipped["undecodable"] += 1
        return False
    return True


def _whole(path: Path, skipped: collections.Counter) -> Iterator[bytes]:
    content = _content(path, skipped)
    if content is not None:
        yield content


def _json_lines(path: Path, config: DataConfig, skipped: collections.Counter, fields: list[str]) -> Iterator[bytes]:
    if not path.is_file():
        skipped["unreadable"] += 1
        return
    try:
        with path.open("rb") as lines:
            for line in lines:
                if line.strip():
                    text = _json_text(line, config.jsonl_field, skipped, fields)
                    if text is not None:
                        yield text
    except OSError:
        skipped["unreadable"] += 1


def _json_text(line: bytes, field: str, skipped: collections.Counter, fields: list[str]) -> bytes | None:
    """The named field of one line as UTF-8; None, counted, when there is none. Keeps the first object's field names."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        skipped["undecodable"] += 1
        return None
    except (ValueError, RecursionError):
        skipped["not_json"] += 1
        return None
    if isinstance(record, dict) and not fields:
        fields.extend(record)
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        skipped["missing_field"] += 1
        return None
    try:
        return record[field].encode()
    except UnicodeEncodeError:  # an escaped half of a surrogate pair
        skipped["undecodable"] += 1
        return None


def _content(path: Path, skipped: collections.Counter) -> bytes | None:
    try:
        # A broken link cannot be read, and a pipe would never end.
        if path.is_file():
            return path.read_bytes()
    except OSError:
        pass
    skipped["unreadable"] += 1
    return None


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _walk(root, INSTALLED_PACKAGES) if path.suffix == ".py"]
    if not paths:
        raise ConfigError(f"data.source = 'stdlib': no .py files in {root}; use another of text, jsonl, arrayrecord")
    return paths


def _files(pattern: str, source: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        paths = [found for found in _walk(path) if source != "jsonl" or found.suffix == ".jsonl"]
    elif path.exists():
        paths = [path]
    else:
        found = glob.glob(str(path), recursive=True)
        paths = sorted((Path(name) for name in found if not os.path.isdir(name)), key=_order)
    if not paths:
        kind = "*.jsonl files" if source == "jsonl" else "files"
        raise ConfigError(f"data.path = '{pattern}': no {kind} found; a file, a folder or a glob is needed")
    return paths


def _walk(root: Path, left_out: tuple[str, ...] = ()) -> list[Path]:
    """Every file below root but hidden ones, sorted by path."""
    paths = []
    for folder, subfolders, names in os.walk(root, onerror=_refuse):
        subfolders[:] = [name for name in subfolders if name not in left_out and not name.startswith(".")]
        paths.extend(Path(folder, name) for name in names if not name.startswith("."))
    return sorted(paths, key=_order)


def _refuse(error: OSError) -> None:
    raise ConfigError(f"data.path: folder '{error.filename}' cannot be listed ({error.strerror})")


def _order(path: Path) -> tuple[bytes, ...]:
    return tuple(os.fsencode(part) for part in path.parts)
