"""A data configuration opened: both halves of the documents as packed sequences, and what was left out.

This file decides the held-out split and refuses data sets that cannot be trained on; it does not batch or place.
"""

import dataclasses
from pathlib import Path

import numpy as np

from ep_jax.data.config import DataConfig
from ep_jax.data.documents import scan, skipped_text
from ep_jax.data.manifest import TokenizerInfo
from ep_jax.data.packing import cached_packing, packing_key
from ep_jax.data.sequences import Sequences
from ep_jax.data.shards import open_shards
from ep_jax.data.store import TokenStore, cache_folder, open_cached
from ep_jax.data.tokenizer import Tokenizer, open_tokenizer
from ep_jax.fields import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Training and held-out sequences of one source. No document has a part in both."""

    source: str
    train: Sequences
    held_out: Sequences
    tokenizer: TokenizerInfo
    skipped: dict[str, int]  # reason -> documents left out

    @property
    def fingerprint(self) -> str:
        """Hex text, equal exactly when both halves have equal rows."""
        return f"{self.train.fingerprint}-{self.held_out.fingerprint}"

    def describe(self) -> str:
        """What was found, in one line per half and one for the source."""
        manifest = self.train.store.manifest
        lines = [
            f"data: {self.source}, {manifest.documents:,} documents, {manifest.tokens:,} tokens "
            f"({self.tokenizer.name}, {self.tokenizer.vocab_size} ids); skipped: {skipped_text(self.skipped)}"
        ]
        for name, half in (("training", self.train), ("held out", self.held_out)):
            columns = half.num_rows * half.sequence_length
            lines.append(
                f"  {name}: {len(half.documents):,} documents in {half.num_rows:,} rows of {half.sequence_length}, "
                f"{half.num_inputs:,} targets, {1 - half.num_inputs / columns:.2%} padding"
            )
        return "\n".join(lines)


def open_dataset(config: DataConfig, *, vocab_size: int) -> Dataset:
    """Opens the source, tokenising and packing it where the cache does not hold that already.

    vocab_size: the model's. Raises ConfigError, one line with found and needed numbers, when the tokenizer has more ids
    than the model, a file is damaged, or a half of the split would be empty.
    """
    tokenizer = open_tokenizer(config.tokenizer)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"model.vocab_size = {vocab_size}: data.tokenizer = '{config.tokenizer}' needs at least "
            f"{tokenizer.vocab_size}"
        )
    store = _open_prepared(config, tokenizer) if config.source == "arrayrecord" else _open_text(config, tokenizer)
    train, held_out = (
        _sequences(store, documents, config) for documents in split_documents(store.hashes, config.held_out_fraction)
    )
    return Dataset(config.source, train, held_out, store.manifest.tokenizer, store.manifest.skipped)


def split_documents(hashes: np.ndarray, held_out_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (int64) of the training and the held-out documents.

    A document is held out when its content's hash, as a fraction of 2^64, is below `held_out_fraction`: files that
    come or go change nothing for the others, and equal documents stay together. Raises ConfigError for an empty half.
    """
    held_out = hashes < np.uint64(int(held_out_fraction * 2**64))
    num_held_out = int(held_out.sum())
    num_train = len(hashes) - num_held_out
    if not num_train or not num_held_out:
        raise ConfigError(
            f"data.held_out_fraction = {held_out_fraction}: found {len(hashes)} documents, {num_train} for training "
            f"and {num_held_out} held out; needed at least 1 of each: more documents or another fraction"
        )
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _open_text(config: DataConfig, tokenizer: Tokenizer) -> TokenStore:
    found = scan(config)
    split_documents(found.hashes, config.held_out_fraction)  # refused before anything is written
    return open_cached(config, tokenizer, found)


def _open_prepared(config: DataConfig, tokenizer: Tokenizer) -> TokenStore:
    store = open_shards(Path(config.path).expanduser(), verify=config.verify)
    written = store.manifest.tokenizer
    if written.fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"data.tokenizer = '{config.tokenizer}': found hash {tokenizer.fingerprint}, needed {written.fingerprint} "
            f"of '{written.name}' that wrote {store.folder}"
        )
    return store


def _sequences(store: TokenStore, documents: np.ndarray, config: DataConfig) -> Sequences:
    lengths = store.lengths[documents]
    folders = [store.folder, cache_folder(config)] if config.source == "arrayrecord" else [cache_folder(config)]
    packing = cached_packing(documents, lengths, config.sequence_length, folders)
    key = packing_key(documents, lengths, config.sequence_length)
    content = f"{store.manifest.source_fingerprint}-{store.manifest.tokenizer.fingerprint}"
    return Sequences(store, documents, packing, config.sequence_length, f"{content}-{key}")
