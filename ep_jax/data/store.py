"""Tokenised documents of a text source, kept as one flat memory-mapped array in the cache.

Layout `flat` of `manifest.py`: `tokens.bin` is every document's tokens one after the other, little-endian uint16 or
uint32. The folder's name is a fingerprint of the documents and the tokenizer, so a changed file, order or tokenizer
makes a new one; two processes that write the same one at once both succeed and one copy stays. Old folders are never
removed; deleting the cache is always safe.
"""

import abc
import dataclasses
import hashlib
from pathlib import Path

import numpy as np

from ep_jax.data.config import DataConfig
from ep_jax.data.documents import Scan
from ep_jax.data.manifest import Manifest, new_folder, read_documents_table, read_manifest, seal, write_tokens
from ep_jax.data.tokenizer import Tokenizer
from ep_jax.fields import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStore(abc.ABC):
    """Documents as tokens, wherever they are kept."""

    manifest: Manifest
    folder: Path
    lengths: np.ndarray  # int64 [documents], at least 1
    hashes: np.ndarray  # uint64 [documents]

    @abc.abstractmethod
    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens [stop - start] of one document, unsigned; safe to call from several threads."""


@dataclasses.dataclass(frozen=True, eq=False)
class FlatStore(TokenStore):
    """A flat folder, memory-mapped."""

    offsets: np.ndarray  # int64 [documents], first token of each in `tokens`
    tokens: np.ndarray  # [tokens]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        offset = self.offsets[document]
        return self.tokens[offset + start : offset + stop]


def open_cached(config: DataConfig, tokenizer: Tokenizer, scan: Scan) -> FlatStore:
    """The tokens of the scanned source, tokenised now or taken from `data.cache_dir`.

    Raises ConfigError when the cache cannot be written, is damaged, or the source changed since it was scanned.
    """
    key = hashlib.blake2b(f"{scan.fingerprint} {tokenizer.fingerprint}".encode(), digest_size=12).hexdigest()
    folder = cache_folder(config) / f"tokens-{key}"
    if not folder.exists():
        try:
            with new_folder(folder) as unfinished:
                manifest = write_flat(unfinished, config, tokenizer)
                if manifest.source_fingerprint != scan.fingerprint:
                    raise ConfigError(f"data.path = '{config.path}': files changed while they were read; start again")
        except FileExistsError:
            pass  # another process wrote the same content meanwhile
        except OSError as error:
            raise ConfigError(f"data.cache_dir = '{config.cache_dir}': {error.strerror} ({error.filename})") from None
    try:
        return open_flat(folder, verify=config.verify)
    except ConfigError as error:
        raise ConfigError(f"{error}; delete {folder} and start again") from None


def cache_folder(config: DataConfig) -> Path:
    """The folder of data.cache_dir with `~` expanded; it need not exist."""
    return Path(config.cache_dir).expanduser()


def write_flat(folder: Path, config: DataConfig, tokenizer: Tokenizer) -> Manifest:
    """Tokenises a text source into an existing empty folder."""
    with (folder / "tokens.bin").open("wb") as file:
        write_tokens(folder, "flat", config, tokenizer, lambda tokens: file.write(tokens.tobytes()))
    return seal(folder)


def open_flat(folder: Path, *, verify: bool) -> FlatStore:
    """Opens a flat folder. Raises ConfigError with found and needed numbers when it is not whole."""
    manifest = read_manifest(folder, "flat", verify=verify)
    lengths, hashes = read_documents_table(folder, manifest)
    path, dtype = folder / "tokens.bin", np.dtype(manifest.dtype)
    found_bytes = path.stat().st_size if path.is_file() else 0
    if found_bytes != manifest.tokens * dtype.itemsize or not found_bytes:
        raise ConfigError(
            f"data: {path}: found {found_bytes} bytes, needed {manifest.tokens * dtype.itemsize} "
            f"({manifest.tokens} tokens of {dtype.itemsize} bytes, at least 1)"
        )
    return FlatStore(manifest, folder, lengths, hashes, np.cumsum(lengths) - lengths, np.memmap(path, dtype, mode="r"))
