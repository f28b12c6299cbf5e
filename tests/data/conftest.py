"""Small data sets for the tests of this folder: in memory, or as files on either side of the held-out split."""

from pathlib import Path

import numpy as np
import pytest

from ep_jax.data.documents import digest_hash, document_digest
from ep_jax.data.manifest import Manifest, TokenizerInfo
from ep_jax.data.packing import pack
from ep_jax.data.sequences import Sequences
from ep_jax.data.store import FlatStore

BOS, EOS, PAD, VOCAB = 256, 257, 258, 259


def sequences_of(documents, sequence_length, *, vocab_size=VOCAB, fingerprint="memory") -> Sequences:
    """Packed rows of lists of token ids, held in memory."""
    lengths = np.array([len(document) for document in documents], np.int64)
    tokens = np.array([token for document in documents for token in document], np.uint16)
    tokenizer = TokenizerInfo(name="bytes", fingerprint="x", vocab_size=vocab_size, bos=BOS, eos=EOS, pad=PAD)
    manifest = Manifest(
        layout="flat",
        tokenizer=tokenizer,
        dtype="<u2",
        documents=len(documents),
        tokens=len(tokens),
        source_fingerprint="x",
        skipped={},
        files={},
    )
    hashes = np.zeros(len(documents), np.uint64)
    store = FlatStore(manifest, Path("memory"), lengths, hashes, np.cumsum(lengths) - lengths, tokens)
    numbers = np.arange(len(documents))
    return Sequences(store, numbers, pack(numbers, lengths, sequence_length), sequence_length, fingerprint)


def text_of(num_bytes: int, *, held_out: bool, fraction: float = 0.5) -> bytes:
    """ASCII text of that size whose hash puts it on the wanted side of the split."""
    for attempt in range(1000):
        content = np.random.default_rng(attempt).integers(97, 123, num_bytes, dtype=np.uint8).tobytes()
        if (digest_hash(document_digest(content)) < int(fraction * 2**64)) == held_out:
            return content
    raise AssertionError("no such text found")


@pytest.fixture(scope="session")
def make_sequences():
    return sequences_of


@pytest.fixture(scope="session")
def make_text():
    return text_of


@pytest.fixture
def corpus(tmp_path):
    """A folder of 40 text files of 1 to 400 bytes and its data configuration."""
    from ep_jax.data import DataConfig

    folder = tmp_path / "corpus"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(40):
        (folder / f"{i:02d}.txt").write_bytes(rng.integers(97, 123, 1 + 10 * i, dtype=np.uint8).tobytes())
    cache = str(tmp_path / "cache")
    return DataConfig(source="text", path=str(folder), sequence_length=32, held_out_fraction=0.25, cache_dir=cache)
