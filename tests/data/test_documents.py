"""Which documents a source has, in which order, and what is skipped and counted."""

import collections
import dataclasses
import os
import sysconfig

import pytest

from ep_jax.data.config import DataConfig
from ep_jax.data.documents import read_documents, scan
from ep_jax.fields import ConfigError


def documents_of(config):
    skipped = collections.Counter()
    return list(read_documents(config, skipped)), dict(skipped)


def test_text_folder_is_sorted_recursive_and_counts_what_it_skips(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "z.txt").write_bytes(b"last")
    (tmp_path / "b" / "c.md").write_bytes("é\r\n".encode())
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / ".git" / "config").write_bytes(b"hidden")
    (tmp_path / ".hidden").write_bytes(b"hidden")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    documents, skipped = documents_of(DataConfig(source="text", path=str(tmp_path)))
    assert documents == [b"first", "é\r\n".encode(), b"last"]
    assert skipped == {"empty": 1, "undecodable": 1, "unreadable": 2}


def test_glob_and_single_file(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "2.py").write_bytes(b"two")
    (tmp_path / "1.py").write_bytes(b"one")
    (tmp_path / "3.txt").write_bytes(b"three")
    assert documents_of(DataConfig(source="text", path=f"{tmp_path}/**/*.py"))[0] == [b"one", b"two"]
    assert documents_of(DataConfig(source="text", path=str(tmp_path / "3.txt")))[0] == [b"three"]


def test_order_does_not_depend_on_the_file_system(tmp_path):
    """The same files written in opposite orders give the same scan."""
    scans = []
    for folder, names in (("up", "abcde"), ("down", "edcba")):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(name * 3)
        scans.append(scan(DataConfig(source="text", path=str(tmp_path / folder))))
    assert scans[0].fingerprint == scans[1].fingerprint
    assert scans[0].hashes.tolist() == scans[1].hashes.tolist()


def test_json_lines_take_one_field_and_count_the_rest(tmp_path):
    lines = [
        b'{"text": "one\\n", "id": 1}',
        b"",
        b'{"body": "no text"}',
        b'{"text": 5}',
        b"[1, 2]",
        b"{broken",
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": ""}',
        b"[" * 100_000,
        '{"text": "zwei ä"}'.encode(),
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "notes.txt").write_bytes(b"not a JSON-lines file")
    documents, skipped = documents_of(DataConfig(source="jsonl", path=str(tmp_path)))
    assert documents == [b"one\n", "zwei ä".encode()]
    assert skipped == {"missing_field": 3, "not_json": 2, "undecodable": 2, "empty": 1}


def test_json_lines_without_the_field_are_refused_with_the_nearest_name(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"texts": "x", "id": 1}\n')
    config = DataConfig(source="jsonl", path=str(tmp_path), jsonl_field="text")
    with pytest.raises(ConfigError, match=r"0 documents in 1 files.*1 missing_field; nearest field is 'texts'"):
        documents_of(config)
    assert documents_of(dataclasses.replace(config, jsonl_field="texts"))[0] == [b"x"]


@pytest.mark.parametrize(("source", "name"), [("text", "nowhere"), ("text", "*.txt"), ("jsonl", "")])
def test_no_files_are_refused(tmp_path, source, name):
    with pytest.raises(ConfigError, match=r"data\.path = .*no .*files found"):
        documents_of(DataConfig(source=source, path=str(tmp_path / name)))


def test_only_empty_files_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match="0 documents in 1 files, needed at least 2; skipped: 1 empty"):
        documents_of(DataConfig(source="text", path=str(tmp_path)))


def test_stdlib_is_there_sorted_and_without_installed_packages():
    documents, skipped = documents_of(DataConfig())
    with open(os.path.join(sysconfig.get_path("stdlib"), "ast.py"), "rb") as file:
        assert file.read() in documents
    assert len(documents) > 300
    assert all(documents)
    assert set(skipped) <= {"empty", "undecodable", "unreadable"}
    with open(pytest.__file__, "rb") as file:
        assert file.read() not in documents
