"""Manifest of sizes and CRC-32: every kind of damage is found and named."""

import json
import zlib

import pytest

from ep_jax.integrity import MANIFEST, checksums, find_damage, read_manifest, write_manifest

FILES = {"a": b"first file", "deep/er/b": bytes(range(256)) * 64, "empty": b""}


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    write_manifest(tmp_path, checksums(tmp_path))
    return tmp_path


def flip(path, offset, bit=0):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def test_manifest_holds_size_and_crc_of_every_file(folder):
    expected = {name: {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"} for name, data in FILES.items()}
    assert read_manifest(folder) == expected
    assert find_damage(folder) is None
    assert sorted(path.name for path in folder.iterdir()) == ["MANIFEST.json", "a", "deep", "empty"]


def test_missing_file_is_named(folder):
    (folder / "a").unlink()
    assert find_damage(folder) == "a: expected 10 bytes, found no such file"


def test_truncated_file_is_named_with_both_sizes(folder):
    path = folder / "deep/er/b"
    path.write_bytes(path.read_bytes()[:-1])
    assert find_damage(folder) == "deep/er/b: expected 16384 bytes, found 16383"
    assert find_damage(folder, contents=False) == "deep/er/b: expected 16384 bytes, found 16383"


@pytest.mark.parametrize("offset", [0, 8191, 16383])
@pytest.mark.parametrize("bit", [0, 7])
def test_every_flipped_bit_is_found(folder, offset, bit):
    flip(folder / "deep/er/b", offset, bit)
    expected = f"{zlib.crc32(FILES['deep/er/b']):08x}"
    found = f"{zlib.crc32((folder / 'deep/er/b').read_bytes()):08x}"
    assert find_damage(folder) == f"deep/er/b: expected CRC-32 {expected}, found {found}"
    assert find_damage(folder, contents=False) is None  # as documented: sizes only


def test_missing_manifest_is_damage(folder):
    (folder / MANIFEST).unlink()
    assert find_damage(folder) == "MANIFEST.json: expected a manifest, found no such file"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"files": {"a": 3}}', b'{"files": {}}'])
def test_unreadable_manifest_is_damage(folder, content):
    (folder / MANIFEST).write_bytes(content)
    assert find_damage(folder).startswith("MANIFEST.json: expected ")


def test_any_flipped_bit_of_the_manifest_is_harmless_or_found(folder):
    good = read_manifest(folder)
    original = (folder / MANIFEST).read_bytes()
    for offset in range(len(original)):
        flip(folder / MANIFEST, offset, bit=offset % 8)
        assert find_damage(folder) is not None or read_manifest(folder) == good, offset
        (folder / MANIFEST).write_bytes(original)


def test_a_regular_file_or_nothing_in_place_of_the_folder(folder):
    assert find_damage(folder / "a") == "expected a folder, found a regular file"
    assert find_damage(folder / "none") == "expected a folder, found nothing"


def test_shares_divide_the_files(folder):
    parts = [checksums(folder, (index, 2)) for index in range(2)]
    assert sorted(map(len, parts)) == [1, 2]
    assert parts[0] | parts[1] == read_manifest(folder)
    (folder / "a").write_bytes(b"First file")  # "a" is the first file, so it is in share 0
    assert find_damage(folder, (0, 2)) is not None
    assert find_damage(folder, (1, 2)) is None


def test_files_that_came_later_are_ignored(folder):
    (folder / "note").write_text("mine")
    assert find_damage(folder) is None
    assert json.loads((folder / MANIFEST).read_text()).keys() == {"files"}
