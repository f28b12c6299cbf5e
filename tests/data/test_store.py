"""The token cache: keyed by content, whole or absent, shared by racing processes, damage noticed."""

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest

from ep_jax.data.documents import scan
from ep_jax.data.manifest import new_folder
from ep_jax.data.store import open_cached, write_flat
from ep_jax.data.tokenizer import open_tokenizer
from ep_jax.fields import ConfigError

BYTES = open_tokenizer("bytes")


def open_store(config):
    return open_cached(config, BYTES, scan(config))


def cached_folders(config):
    return sorted(Path(config.cache_dir).iterdir())


def test_cache_holds_each_document_and_is_used_again(corpus):
    store = open_store(corpus)
    files = sorted(Path(corpus.path).iterdir())
    assert store.manifest.documents == len(files)
    for document, file in enumerate(files):
        assert store.read(document, 0, int(store.lengths[document])).tobytes().replace(b"\0", b"") == file.read_bytes()
    assert store.tokens.dtype == np.uint16
    written = (store.folder / "tokens.bin").stat().st_mtime_ns
    assert (open_store(corpus).folder / "tokens.bin").stat().st_mtime_ns == written
    assert cached_folders(corpus) == [store.folder]


def test_changed_content_or_tokenizer_makes_another_folder(corpus):
    open_store(corpus)
    (Path(corpus.path) / "00.txt").write_bytes(b"changed")
    assert open_store(corpus).read(0, 0, 7).tolist() == list(b"changed")
    other = dataclasses.replace(BYTES, fingerprint="another")
    open_cached(corpus, other, scan(corpus))
    assert len(cached_folders(corpus)) == 3


def test_files_that_change_between_scan_and_reading_are_refused_and_not_cached(corpus):
    found = scan(corpus)
    (Path(corpus.path) / "00.txt").write_bytes(b"changed")
    with pytest.raises(ConfigError, match="files changed while they were read"):
        open_cached(corpus, BYTES, found)
    assert cached_folders(corpus) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], r"tokens\.bin: found \d*[13579] bytes, needed \d*[02468] bytes"),
        (lambda content: b"", r"found 0 bytes, needed"),
        (lambda content: content[:9] + bytes([content[9] ^ 1]) + content[10:], r"damaged, found CRC-32 \w{8}, needed"),
    ],
)
def test_a_damaged_cache_is_refused_with_the_numbers(corpus, damage, message):
    file = open_store(corpus).folder / "tokens.bin"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=message + r".*; delete .* and start again"):
        open_store(corpus)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "not a manifest"),
        ('{"tokenizer": {}}', "not a manifest"),
    ],
)
def test_a_damaged_manifest_is_refused(corpus, content, message):
    file = open_store(corpus).folder / "manifest.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        open_store(corpus)


def test_many_at_once_leave_one_copy(corpus):
    found, stores = scan(corpus), []
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        stores.append(open_cached(corpus, BYTES, found))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 8
    assert cached_folders(corpus) == [stores[0].folder]
    assert all((store.tokens == stores[0].tokens).all() for store in stores)


def test_a_lost_race_keeps_the_winner_and_an_error_leaves_nothing(tmp_path):
    final = tmp_path / "final"

    def write(who, meanwhile=lambda: None):
        with new_folder(final) as folder:
            (folder / "who").write_text(who)
            meanwhile()

    with pytest.raises(FileExistsError):
        write("loser", meanwhile=lambda: write("winner"))
    assert (final / "who").read_text() == "winner"
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "other"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [final]


def test_a_cache_that_cannot_be_written_is_refused(corpus, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"data\.cache_dir = "):
        open_store(dataclasses.replace(corpus, cache_dir=str(tmp_path / "file")))


def test_documents_without_a_token_are_counted_as_empty(corpus, tmp_path):
    class DropsShort:
        name, vocab_size, bos, eos, pad, fingerprint = "drops", 259, 256, 257, 258, "drops"

        def encode_batch(self, contents):
            return [ids if ids.size > 100 else ids[:0] for ids in BYTES.encode_batch(contents)]

    folder = tmp_path / "flat"
    folder.mkdir()
    manifest = write_flat(folder, corpus, DropsShort())
    assert manifest.skipped == {"empty": 10}
    assert manifest.documents == 30
