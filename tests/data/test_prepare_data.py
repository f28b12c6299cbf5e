"""Prepared ArrayRecord folders: same data as the text they came from, whole or absent, damage refused."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from ep_jax.data import open_dataset
from ep_jax.data.manifest import seal
from ep_jax.data.shards import open_shards
from ep_jax.fields import ConfigError
from tools.prepare_data import main, prepare


@pytest.fixture
def prepared(corpus, tmp_path):
    """A folder of several shards of the corpus, and its data configuration."""
    out = tmp_path / "prepared"
    prepare(corpus, out, shard_bytes=4000)
    return dataclasses.replace(corpus, source="arrayrecord", path=str(out))


def test_shards_give_the_rows_of_the_text(corpus, prepared):
    """Same split, packing, batches and fingerprint as tokenising at the start of the run."""
    text, shards = (open_dataset(config, vocab_size=259) for config in (corpus, prepared))
    assert text.fingerprint == shards.fingerprint
    for mine, theirs in ((text.train, shards.train), (text.held_out, shards.held_out)):
        rows = np.arange(mine.num_rows)
        for a, b in zip(mine.batch(rows), theirs.batch(rows), strict=True):
            np.testing.assert_array_equal(a, b)


def test_manifest_tells_what_is_there_and_the_packing_is_used(prepared):
    folder = Path(prepared.path)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["documents"] == 40
    assert manifest["tokens"] == sum(1 + 10 * i for i in range(40))
    assert manifest["dtype"] == "<u2"
    assert manifest["tokenizer"]["fingerprint"] == "bytes-256+3"
    shards = [name for name in manifest["files"] if name.endswith(".arrayrecord")]
    assert len(shards) == 4  # 15,680 bytes of tokens in shards of a little over 4,000
    assert {path.name for path in folder.iterdir()} == {*manifest["files"], "manifest.json"}
    assert sum(name.startswith("packing-") for name in manifest["files"]) == 2
    open_dataset(prepared, vocab_size=259)
    assert not Path(prepared.cache_dir).exists()  # both indices came with the data


def test_another_sequence_length_is_packed_at_the_first_run(prepared):
    config = dataclasses.replace(prepared, sequence_length=48)
    assert open_dataset(config, vocab_size=259).train.sequence_length == 48
    assert len(list(Path(prepared.cache_dir).iterdir())) == 2


def damaged(folder, name, change):
    file = folder / name
    file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "shard-00001.arrayrecord",
            lambda c: c[:-1000],
            r"shard-00001\.arrayrecord: found \d+ bytes, needed \d+ bytes",
        ),
        ("shard-00001.arrayrecord", lambda c: c + b"x", r"found \d+ bytes, needed \d+ bytes"),
        ("shard-00002.arrayrecord", lambda c: c[:70] + b"?" + c[71:], r"damaged, found CRC-32 \w{8}, needed \w{8}"),
        ("lengths.npy", lambda c: c[:-8], r"lengths\.npy: found \d+ bytes, needed"),
    ],
)
def test_damage_is_refused_with_the_numbers(prepared, name, change, message):
    damaged(Path(prepared.path), name, change)
    with pytest.raises(ConfigError, match=message):
        open_dataset(prepared, vocab_size=259)


def test_a_missing_shard_and_a_folder_that_is_none_are_refused(prepared, tmp_path):
    (Path(prepared.path) / "shard-00000.arrayrecord").unlink()
    with pytest.raises(ConfigError, match=r"shard-00000\.arrayrecord: no such file, needed \d+ bytes"):
        open_dataset(prepared, vocab_size=259)
    with pytest.raises(ConfigError, match=r"manifest\.json.*needed is a folder written by tools\.prepare_data"):
        open_dataset(dataclasses.replace(prepared, path=str(tmp_path)), vocab_size=259)


@pytest.mark.parametrize("more", [-2, 2])
def test_counts_that_disagree_are_refused_even_when_every_file_is_whole(prepared, more):
    """Files replaced and sealed again: the table no longer fits the records."""
    folder = Path(prepared.path)
    lengths = np.load(folder / "lengths.npy")
    lengths[[5, 6]] += [more, -more]
    np.save(folder / "lengths.npy", lengths)
    seal(folder)
    found, wanted = 2 * 51, 2 * (51 + more)
    with pytest.raises(ConfigError, match=f"record 5: found {found} bytes, needed {wanted}"):
        open_shards(folder, verify=True).read(5, 0, 1)


@pytest.mark.parametrize(
    ("change", "message"), [(-1, "a document of 0 tokens"), (1, "found lengths of 7841 tokens, needed 7840")]
)
def test_empty_documents_and_wrong_totals_are_refused(prepared, change, message):
    folder = Path(prepared.path)
    lengths = np.load(folder / "lengths.npy")
    lengths[0] += change
    np.save(folder / "lengths.npy", lengths)
    seal(folder)
    with pytest.raises(ConfigError, match=message):
        open_shards(folder, verify=True)


def test_without_verification_a_flipped_bit_is_still_refused_when_read(prepared):
    folder = Path(prepared.path)
    store = open_shards(folder, verify=False)
    good = [store.read(i, 0, int(n)).tobytes() for i, n in enumerate(store.lengths)]
    file = next(folder.glob("shard-00000*"))
    content = bytearray(file.read_bytes())
    at = next(i for i in range(200, len(content)) if content[i] and content[i + 1])
    content[at] ^= 1
    file.write_bytes(content)
    store, refusals = open_shards(folder, verify=False), []
    for i, n in enumerate(store.lengths.tolist()):
        try:
            assert store.read(i, 0, n).tobytes() == good[i]
        except ConfigError as error:
            refusals.append(str(error))
    assert refusals
    assert all("cannot be read" in refusal for refusal in refusals)


def test_the_tokenizer_must_be_the_one_that_wrote_the_shards(corpus, tmp_path):
    """Ids above 65,535 get a wide dtype and survive; another tokenizer is refused by hash."""
    words = {"<s>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, 70_000)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "words.json"))
    for i in range(8):
        (Path(corpus.path) / f"{i}.words").write_text(f"w{i + 2} w69999 w65536")
    config = dataclasses.replace(
        corpus,
        path=f"{corpus.path}/*.words",
        tokenizer=str(tmp_path / "words.json"),
        held_out_fraction=0.5,
    )
    prepare(config, tmp_path / "out", shard_bytes=1 << 20)
    config = dataclasses.replace(
        config, source="arrayrecord", path=str(tmp_path / "out"), tokenizer=str(tmp_path / "out" / "tokenizer.json")
    )
    dataset = open_dataset(config, vocab_size=70_000)
    assert dataset.train.store.manifest.dtype == "<u4"
    assert dataset.train.store.read(3, 0, 3).tolist() == [5, 69_999, 65_536]
    assert {69_999, 65_536, 0, 1} <= set(dataset.train.batch(np.arange(1)).targets[0].tolist()) | {0}
    with pytest.raises(ConfigError, match=r"data\.tokenizer = 'bytes': found hash bytes-256\+3, needed \w{32}"):
        open_dataset(dataclasses.replace(config, tokenizer="bytes"), vocab_size=70_000)
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 259: .*needs at least 70000"):
        open_dataset(config, vocab_size=259)


def test_the_command_prints_what_it_wrote_and_refuses_to_overwrite(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    main(["--source", "text", "--path", corpus.path, "--out", str(out), "--held-out-fraction", "0.25"])
    assert "40 documents, 7,840 tokens in 1 shards; skipped: none" in capsys.readouterr().out
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ConfigError, match="exists already and is not overwritten"):
        main(["--source", "text", "--path", corpus.path, "--out", str(out)])
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_refusal_is_one_line_exit_code_2_and_leaves_nothing(tmp_path):
    (tmp_path / "one.txt").write_text("only one document")
    arguments = ["--path", str(tmp_path / "one.txt"), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "tools.prepare_data", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "found 1 documents" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]


@pytest.mark.parametrize("arguments", [["--pth", "x"], ["--out", "x", "--shard-mib", "0", "--path", "y"], []])
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(ConfigError):
        main(arguments)
