"""A folder of tokens on disk: what every such folder holds, how it is written whole and how damage is noticed.

Two layouts share it: `flat` (`store.py`, the cache of text sources) and `arrayrecord` (`shards.py`, prepared data).
Both hold the tokens of each document without BOS and EOS, and beside them

    lengths.npy     int64 [documents], tokens of each document
    hashes.npy      uint64 [documents], of each document's text: decides the held-out split, whatever the tokenizer
    manifest.json   format, tokenizer, counts, dtype, and bytes and CRC-32 of every other file

A folder is written under a temporary name and renamed, so that it is there whole or not at all. This file does not
read tokens.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np

from ep_jax.data.config import DataConfig
from ep_jax.data.documents import digest_hash, document_digest, read_documents, skipped_text
from ep_jax.data.tokenizer import Tokenizer, token_dtype
from ep_jax.fields import ConfigError

FORMAT = "ep_jax.tokens"
VERSION = 1
DOCUMENTS_PER_CALL = 256  # encoded together: the tokenizer library spreads them over the cores
CHUNK_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """What a folder remembers of the tokenizer that wrote it."""

    name: str
    fingerprint: str
    vocab_size: int
    bos: int
    eos: int
    pad: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    layout: str  # flat or arrayrecord
    tokenizer: TokenizerInfo
    dtype: str  # "<u2" or "<u4"
    documents: int
    tokens: int
    source_fingerprint: str
    skipped: dict[str, int]
    files: dict[str, dict[str, int]]  # name -> {"bytes": ..., "crc32": ...}
    format: str = FORMAT
    version: int = VERSION


def describe_tokenizer(tokenizer: Tokenizer) -> TokenizerInfo:
    """The lasting part of a tokenizer; the name without its folder."""
    return TokenizerInfo(
        name=Path(tokenizer.name).name,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        pad=tokenizer.pad,
    )


@contextlib.contextmanager
def new_folder(final: Path) -> Generator[Path]:
    """Yields an empty folder beside `final` and renames it to `final` at the end; on any error nothing is left.

    Raises FileExistsError when `final` came into being meanwhile; it is never overwritten.
    """
    temporary = final.parent / f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if final.exists():
            raise FileExistsError(17, "exists already", str(final))
        try:
            temporary.rename(final)
        except OSError as error:
            # Lost a race: the system says ENOTEMPTY or EEXIST.
            raise (FileExistsError(17, "exists already", str(final)) if final.exists() else error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_tokens(
    folder: Path, layout: str, config: DataConfig, tokenizer: Tokenizer, write: Callable[[np.ndarray], object]
) -> None:
    """Tokenises every document of a text source, in order, into `write`; then writes lengths.npy and hashes.npy.

    `write_manifest` must follow once the last file is closed. Documents without a single token are counted as empty.
    """
    skipped: collections.Counter = collections.Counter()
    source, lengths, hashes = hashlib.blake2b(digest_size=16), [], []
    for contents in itertools.batched(read_documents(config, skipped), DOCUMENTS_PER_CALL):
        for content, tokens in zip(contents, tokenizer.encode_batch(contents), strict=True):
            digest = document_digest(content)
            source.update(digest)
            if tokens.size == 0:
                skipped["empty"] += 1
                continue
            write(tokens)
            lengths.append(tokens.size)
            hashes.append(digest_hash(digest))
    if not lengths:
        raise ConfigError(
            f"data.path = '{config.path}': found 0 documents with tokens; skipped: {skipped_text(skipped)}"
        )
    np.save(folder / "lengths.npy", np.array(lengths, np.int64))
    np.save(folder / "hashes.npy", np.array(hashes, np.uint64))
    draft = Manifest(
        layout=layout,
        tokenizer=describe_tokenizer(tokenizer),
        dtype=token_dtype(tokenizer.vocab_size).str,
        documents=len(lengths),
        tokens=sum(lengths),
        source_fingerprint=source.hexdigest(),
        skipped=dict(skipped),
        files={},
    )
    _write_json(folder, draft)


def seal(folder: Path) -> Manifest:
    """Records bytes and CRC-32 of every file of the folder in its manifest; the last act of writing."""
    files = {
        path.name: {"bytes": path.stat().st_size, "crc32": file_crc32(path)}
        for path in sorted(folder.iterdir())
        if path.name != "manifest.json"
    }
    manifest = dataclasses.replace(_read_json(folder), files=files)
    _write_json(folder, manifest)
    return manifest


def read_manifest(folder: Path, layout: str, *, verify: bool) -> Manifest:
    """Reads manifest.json and checks every file's size and, with `verify`, its CRC-32.

    Raises ConfigError naming the file with found and needed numbers when anything is missing, truncated or damaged.
    """
    manifest = _read_json(folder)
    if manifest.layout != layout:
        raise ConfigError(f"data.path = '{folder}': found layout {manifest.layout!r}, needed {layout!r}")
    for name, needed in manifest.files.items():
        path = folder / name
        found_bytes = path.stat().st_size if path.is_file() else None
        if found_bytes != needed["bytes"]:
            found = "no such file" if found_bytes is None else f"found {found_bytes} bytes"
            raise ConfigError(f"data: {path}: {found}, needed {needed['bytes']} bytes")
        if verify and (crc32 := file_crc32(path)) != needed["crc32"]:
            raise ConfigError(f"data: {path}: damaged, found CRC-32 {crc32:08x}, needed {needed['crc32']:08x}")
    return manifest


def read_documents_table(folder: Path, manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    """lengths int64 [documents] and hashes uint64 [documents], checked against the manifest's counts."""
    try:
        lengths, hashes = np.load(folder / "lengths.npy"), np.load(folder / "hashes.npy")
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"data: {folder}: lengths.npy or hashes.npy cannot be read ({error})") from None
    if lengths.shape != (manifest.documents,) or hashes.shape != lengths.shape:
        raise ConfigError(
            f"data: {folder}: found {lengths.shape} lengths and {hashes.shape} hashes, "
            f"needed {manifest.documents} of each"
        )
    if lengths.dtype != np.int64 or hashes.dtype != np.uint64:
        raise ConfigError(f"data: {folder}: found {lengths.dtype} lengths and {hashes.dtype} hashes")
    if manifest.documents and lengths.min() < 1:
        raise ConfigError(f"data: {folder}: found a document of {lengths.min()} tokens, needed at least 1")
    if lengths.sum() != manifest.tokens:
        raise ConfigError(f"data: {folder}: found lengths of {lengths.sum()} tokens, needed {manifest.tokens}")
    return lengths, hashes


def file_crc32(path: Path) -> int:
    """CRC-32 of a file, read in chunks."""
    crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _write_json(folder: Path, manifest: Manifest) -> None:
    text = json.dumps(dataclasses.asdict(manifest), indent=1)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")


def _read_json(folder: Path) -> Manifest:
    path = folder / "manifest.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        needed = "needed is a folder written by tools.prepare_data"
        raise ConfigError(f"data.path = '{folder}': manifest.json: {error.strerror}; {needed}") from None
    except ValueError:
        raise ConfigError(f"data: {path}: not JSON") from None
    try:
        content["tokenizer"] = TokenizerInfo(**content["tokenizer"])
        manifest = Manifest(**content)
    except (TypeError, KeyError) as error:
        raise ConfigError(f"data: {path}: not a manifest of version {VERSION} ({error})") from None
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        found = f"{manifest.format} version {manifest.version}"
        raise ConfigError(f"data: {path}: found {found}, needed {FORMAT} version {VERSION}")
    if manifest.dtype != token_dtype(manifest.tokenizer.vocab_size).str:
        raise ConfigError(
            f"data: {path}: found dtype {manifest.dtype!r}, needed "
            f"{token_dtype(manifest.tokenizer.vocab_size).str!r} for {manifest.tokenizer.vocab_size} ids"
        )
    return manifest
