"""Pre-tokenised documents in ArrayRecord shards, read through grain.

Layout `arrayrecord` of `manifest.py`: one record is one document's tokens, little-endian in the manifest's dtype, in
files `shard-00000.arrayrecord`, ... A record is read whole, so a document far longer than a sequence costs more reading
than it gives; the few read last are kept. `tools.prepare_data` is the command that writes such a folder.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

from ep_jax.data.config import DataConfig
from ep_jax.data.manifest import read_documents_table, read_manifest, write_tokens
from ep_jax.data.store import TokenStore
from ep_jax.data.tokenizer import Tokenizer
from ep_jax.fields import ConfigError

RECORDS_KEPT = 64


@dataclasses.dataclass(frozen=True, eq=False)
class ShardStore(TokenStore):
    """An arrayrecord folder."""

    records: Any  # grain.sources.ArrayRecordDataSource

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self.document(document)[start:stop]

    @functools.cached_property
    def document(self):
        """Function from a document's number to all its tokens, the last few kept."""
        return functools.lru_cache(maxsize=RECORDS_KEPT)(self._document)

    def _document(self, document: int) -> np.ndarray:
        dtype = np.dtype(self.manifest.dtype)
        try:
            record = self.records[document]
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigError(f"data: {self.folder}: record {document} cannot be read ({error})") from None
        needed_bytes = int(self.lengths[document]) * dtype.itemsize
        if len(record) != needed_bytes:
            raise ConfigError(
                f"data: {self.folder}: record {document}: found {len(record)} bytes, needed {needed_bytes}"
            )
        return np.frombuffer(record, dtype)


def write_shards(folder: Path, config: DataConfig, tokenizer: Tokenizer, *, shard_bytes: int) -> None:
    """Tokenises a text source into shards of about `shard_bytes` in an existing empty folder; `seal` must follow."""
    writer = _ShardWriter(folder, shard_bytes)
    try:
        write_tokens(folder, "arrayrecord", config, tokenizer, writer.write)
    finally:
        writer.close()


def open_shards(folder: Path, *, verify: bool) -> ShardStore:
    """Opens a prepared folder. Raises ConfigError with found and needed numbers when it is not whole."""
    manifest = read_manifest(folder, "arrayrecord", verify=verify)
    lengths, hashes = read_documents_table(folder, manifest)
    paths = [folder / name for name in sorted(manifest.files) if name.endswith(".arrayrecord")]
    if not paths:
        raise ConfigError(f"data.path = '{folder}': found 0 shards, needed at least 1")
    import grain  # here, because it starts JAX's import

    try:
        records = grain.sources.ArrayRecordDataSource(paths)
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"data.path = '{folder}': the shards cannot be opened ({error})") from None
    if len(records) != manifest.documents:
        raise ConfigError(f"data.path = '{folder}': found {len(records)} records, needed {manifest.documents}")
    return ShardStore(manifest, folder, lengths, hashes, records)


class _ShardWriter:
    """Writes records and starts a new shard whenever the current one is full."""

    def __init__(self, folder: Path, shard_bytes: int):
        self.folder, self.shard_bytes = folder, shard_bytes
        self.num_shards, self.written_bytes = 0, 0
        self.writer: Any = None

    def write(self, tokens: np.ndarray) -> None:
        from array_record.python import array_record_module

        if self.writer is None:
            path = self.folder / f"shard-{self.num_shards:05d}.arrayrecord"
            self.writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
            self.num_shards, self.written_bytes = self.num_shards + 1, 0
        self.writer.write(tokens.tobytes())
        self.written_bytes += tokens.nbytes
        if self.written_bytes >= self.shard_bytes:
            self.close()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None
