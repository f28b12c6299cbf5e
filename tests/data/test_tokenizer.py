"""Bytes and tokenizer.json: ids, special ids, dtype and what is refused."""

import json

import numpy as np
import pytest
import tokenizers

from ep_jax.data.tokenizer import encode, open_tokenizer, token_dtype
from ep_jax.fields import ConfigError


def byte_level_file(path, special_tokens=("<|endoftext|>",)):
    """Trains a small byte-level BPE with truncation and padding left on in the file."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(["the cat and the hat and the bat"] * 10, trainer)
    library.enable_truncation(5)
    library.enable_padding(length=7)
    library.save(str(path))
    return library


def test_bytes_are_their_own_ids():
    tokenizer = open_tokenizer("bytes")
    ids = encode(tokenizer, "aé")
    assert ids.tolist() == [97, 0xC3, 0xA9]
    assert ids.dtype == np.uint16
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos, tokenizer.pad) == (259, 256, 257, 258)


def test_tokenizer_file_round_trips_and_ignores_the_files_truncation(tmp_path):
    library = byte_level_file(tmp_path / "tokenizer.json")
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    text = "the cat and the hat, ünd the bat " * 20
    ids = encode(tokenizer, text)
    assert library.decode(ids.tolist()) == text
    assert len(ids) > 7
    assert tokenizer.vocab_size == library.get_vocab_size()
    # A file with one special token uses it as BOS, EOS and padding.
    assert tokenizer.bos == tokenizer.eos == tokenizer.pad == library.token_to_id("<|endoftext|>")


def test_text_cannot_forge_a_special_token(tmp_path):
    byte_level_file(tmp_path / "tokenizer.json")
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.eos not in encode(tokenizer, "a <|endoftext|> b").tolist()


def test_special_ids_by_their_usual_names_and_fingerprint_by_content(tmp_path):
    library = byte_level_file(tmp_path / "tokenizer.json", ("<pad>", "<s>", "</s>"))
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert [tokenizer.pad, tokenizer.bos, tokenizer.eos] == [library.token_to_id(t) for t in ("<pad>", "<s>", "</s>")]
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (tmp_path / "other.json").write_text(json.dumps(content))
    assert open_tokenizer(str(tmp_path / "other.json")).fingerprint != tokenizer.fingerprint


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.tokenizer = 'byte'.*allowed is 'bytes' or the path"):
        open_tokenizer("byte")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a tokenizer\.json"):
        open_tokenizer(str(tmp_path / "broken.json"))
    byte_level_file(tmp_path / "plain.json", ())
    with pytest.raises(ConfigError, match="no end-of-document token"):
        open_tokenizer(str(tmp_path / "plain.json"))


def test_dtype_is_wide_enough():
    assert token_dtype(65536).itemsize == 2
    assert token_dtype(65537).itemsize == 4
