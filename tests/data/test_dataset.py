"""Opening a data set: the split, what is refused and with which numbers, and the real standard library."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ep_jax.data import DataConfig, bigram_cross_entropy, open_dataset
from ep_jax.data.dataset import split_documents
from ep_jax.fields import ConfigError


def test_halves_share_no_document_and_together_are_all(corpus):
    dataset = open_dataset(corpus, vocab_size=259)
    train, held_out = set(dataset.train.documents.tolist()), set(dataset.held_out.documents.tolist())
    assert train
    assert held_out
    assert not train & held_out
    assert train | held_out == set(range(40))
    assert "40 documents, 7,840 tokens" in dataset.describe()
    assert dataset.describe().count("\n") == 2


def test_a_document_stays_on_its_side_when_others_come(corpus):
    def held_out_texts():
        store = (half := open_dataset(corpus, vocab_size=259).held_out).store
        return {store.read(i, 0, int(store.lengths[i])).astype(np.uint8).tobytes() for i in half.documents.tolist()}

    before = held_out_texts()
    for i in range(20):
        (Path(corpus.path) / f"0{i}-new.txt").write_text(f"new {i}")
    texts = {path.read_bytes() for path in Path(corpus.path).glob("??.txt")}
    assert held_out_texts() & texts == before


def test_split_takes_the_share_asked_for():
    hashes = np.random.default_rng(0).integers(0, 2**64, 100_000, np.uint64)
    for fraction in (0.01, 0.5):
        assert len(split_documents(hashes, fraction)[1]) / 100_000 == pytest.approx(fraction, abs=0.005)


@pytest.mark.parametrize(
    ("hashes", "numbers"), [([0], "found 1 documents, 0 for"), ([2**64 - 1] * 3, "3 for training and 0")]
)
def test_an_empty_half_is_refused_with_the_numbers(hashes, numbers):
    with pytest.raises(ConfigError, match=rf"data\.held_out_fraction = 0\.05: .*{numbers}.*needed at least 1 of each"):
        split_documents(np.array(hashes, np.uint64), 0.05)


def test_a_refused_split_or_vocabulary_writes_nothing(corpus):
    with pytest.raises(ConfigError, match="found 40 documents, 40 for training and 0 held out"):
        open_dataset(dataclasses.replace(corpus, held_out_fraction=1e-9), vocab_size=259)
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 258: data\.tokenizer = 'bytes' needs at least 259"):
        open_dataset(corpus, vocab_size=258)
    assert not Path(corpus.cache_dir).exists()


def test_skip_counts_reach_the_description(corpus):
    (Path(corpus.path) / "empty").write_bytes(b"")
    (Path(corpus.path) / "binary").write_bytes(b"\xff\xfe\x00")
    dataset = open_dataset(corpus, vocab_size=259)
    assert dataset.skipped == {"empty": 1, "undecodable": 1}
    assert "skipped: 1 empty, 1 undecodable" in dataset.describe()


def test_fingerprint_follows_content_and_shape(corpus):
    first = open_dataset(corpus, vocab_size=259).fingerprint
    assert open_dataset(corpus, vocab_size=300).fingerprint == first
    assert open_dataset(dataclasses.replace(corpus, sequence_length=33), vocab_size=259).fingerprint != first
    (Path(corpus.path) / "00.txt").write_bytes(b"b")
    assert open_dataset(corpus, vocab_size=259).fingerprint != first


def test_the_running_pythons_library_is_a_data_set(tmp_path):
    dataset = open_dataset(DataConfig(cache_dir=str(tmp_path)), vocab_size=259)
    assert dataset.train.store.manifest.tokens > 5_000_000
    for half in (dataset.train, dataset.held_out):
        assert half.num_rows * 256 / half.num_inputs < 1.01
    held_out = dataset.held_out
    subset = dataclasses.replace(dataset.train, documents=dataset.train.documents[::8])
    assert 1.5 < bigram_cross_entropy(subset, held_out) < math.log(259) / 2


def test_configuration_needs_a_path():
    for source in ("text", "jsonl", "arrayrecord"):
        with pytest.raises(ConfigError, match=r"data\.path = ''"):
            DataConfig(source=source)


def test_importing_the_data_package_does_not_start_jax():
    """The command line must be read before JAX is imported."""
    check = "import sys, ep_jax.data; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60, cwd=Path(__file__).parents[2])
