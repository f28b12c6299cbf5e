"""The size and CRC-32 of every file of a folder: written into a manifest, and checked against it later.

Orbax loads a flipped bit without a word, so the manifest is what makes a damaged checkpoint visible. Nothing here knows
what the files mean, and nothing here imports JAX. A share (i, n) is every n-th file from the i-th on, so that n
processes can divide the reading.
"""

import json
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

MANIFEST = "MANIFEST.json"
READ_BYTES = 1 << 22
READERS = 4  # zlib releases the interpreter lock, so threads read and check in parallel
WHOLE = (0, 1)  # the share that is everything


class FileRecord(TypedDict):
    """What the manifest says of one file; crc32 as eight hexadecimal digits."""

    bytes: int
    crc32: str


def checksums(folder: Path, share: tuple[int, int] = WHOLE) -> dict[str, FileRecord]:
    """Records of the files below `folder` by relative path, manifests left out. Each file is on disk when this ends."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if not name.startswith(MANIFEST)]
    return dict(_map_share(lambda name: (name, _record(folder / name, sync=True)), names, share))


def write_manifest(folder: Path, files: dict[str, FileRecord], name: str = MANIFEST) -> None:
    """Writes the manifest in one piece: a reader sees all of it or none."""
    temporary = folder / f"{name}.writing"
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump({"files": files}, stream, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(folder / name)


def read_manifest(folder: Path, name: str = MANIFEST) -> dict[str, FileRecord]:
    """The records of a manifest. Raises OSError when it cannot be read, ValueError when it is not a manifest."""
    content = json.loads((folder / name).read_bytes())
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(_is_record(record) for record in files.values()):
        raise ValueError("no records of files in it")
    return files


def find_damage(folder: Path, share: tuple[int, int] = WHOLE, *, contents: bool = True) -> str | None:
    """The first way in which `folder` differs from its manifest, in words; None when it is whole.

    The words name the file, what was expected and what was found. Files that the manifest does not list are ignored.
    contents=False compares sizes only, which is quick and misses flipped bits.
    """
    if not folder.is_dir():
        return f"expected a folder, found {'a regular file' if folder.exists() else 'nothing'}"
    try:
        files = read_manifest(folder)
    except FileNotFoundError:
        return f"{MANIFEST}: expected a manifest, found no such file"
    except (OSError, ValueError) as error:
        return f"{MANIFEST}: expected a manifest, found something unreadable ({error})"
    if not files:
        return f"{MANIFEST}: expected a list of files, found an empty one"
    names = sorted(files)
    problems = _map_share(lambda name: _file_damage(folder / name, name, files[name], contents), names, share)
    return next((problem for problem in problems if problem is not None), None)


def _file_damage(path: Path, name: str, expected: FileRecord, contents: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{name}: expected {expected['bytes']} bytes, found {size}"
        if contents and (crc32 := _record(path)["crc32"]) != expected["crc32"]:
            return f"{name}: expected CRC-32 {expected['crc32']}, found {crc32}"
    except FileNotFoundError:
        return f"{name}: expected {expected['bytes']} bytes, found no such file"
    except OSError as error:
        return f"{name}: expected {expected['bytes']} bytes, found it unreadable ({error})"
    return None


def _record(path: Path, *, sync: bool = False) -> FileRecord:
    size, crc32 = 0, 0
    with path.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            size, crc32 = size + len(block), zlib.crc32(block, crc32)
        if sync:
            os.fsync(stream.fileno())
    return {"bytes": size, "crc32": f"{crc32:08x}"}


def _is_record(record: object) -> bool:
    return isinstance(record, dict) and isinstance(record.get("bytes"), int) and isinstance(record.get("crc32"), str)


def _map_share[T](function, names: list[str], share: tuple[int, int]) -> Iterable[T]:
    index, count = share
    with ThreadPoolExecutor(READERS) as readers:
        return list(readers.map(function, names[index::count]))
