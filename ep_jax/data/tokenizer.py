"""Text to token ids: raw bytes, or a Hugging Face tokenizer.json read from disk.

A tokenizer here has `name`, `vocab_size`, `bos`, `eos`, `pad`, `fingerprint` (hex text that changes with anything that
changes ids) and `encode_batch`. Documents become BOS + tokens + EOS later, in `packing.py`; nothing here adds special
tokens, and text that spells one ("<|endoftext|>") is encoded as ordinary text. This file fetches nothing.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ep_jax.fields import ConfigError

# Spellings of special tokens, the first one in the file is taken. Without a BOS the EOS serves as both, as in GPT-2.
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|startoftext|>", "<|bos|>", "[CLS]")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|eos|>", "[SEP]")
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest little-endian unsigned type that holds every id below `vocab_size`: uint16 or uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Each byte is its own id; three special ids follow the 256 bytes."""

    name: str = "bytes"
    vocab_size: int = 259
    bos: int = 256
    eos: int = 257
    pad: int = 258
    fingerprint: str = "bytes-256+3"

    def encode_batch(self, contents: Sequence[bytes]) -> list[np.ndarray]:
        """Token ids of each UTF-8 text, in `token_dtype(vocab_size)`, without special tokens."""
        return [np.frombuffer(content, np.uint8).astype(token_dtype(self.vocab_size)) for content in contents]


@dataclasses.dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer.json: special ids by their usual spellings, truncation and padding of the file switched off."""

    name: str
    vocab_size: int
    bos: int
    eos: int
    pad: int
    fingerprint: str
    library: Any  # tokenizers.Tokenizer

    def encode_batch(self, contents: Sequence[bytes]) -> list[np.ndarray]:
        """Token ids of each UTF-8 text, in `token_dtype(vocab_size)`, without special tokens."""
        texts = [content.decode() for content in contents]
        encodings = self.library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, token_dtype(self.vocab_size)) for encoding in encodings]


type Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(name: str) -> Tokenizer:
    """'bytes' or the path of a tokenizer.json. Raises ConfigError for anything else."""
    return ByteTokenizer() if name == "bytes" else open_tokenizer_file(Path(name).expanduser())


def encode(tokenizer: Tokenizer, content: bytes | str) -> np.ndarray:
    """Token ids [n] of one text, without special tokens."""
    return tokenizer.encode_batch([content.encode() if isinstance(content, str) else content])[0]


def open_tokenizer_file(path: Path) -> FileTokenizer:
    """Reads a tokenizer.json. Raises ConfigError when it cannot be read or names no end-of-document token."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer = '{path}': {error.strerror}; allowed is 'bytes' or the path of a tokenizer.json"
        ) from None
    import tokenizers  # optional at run time: byte-level runs work without it

    try:
        library = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"data.tokenizer = '{path}': not a tokenizer.json ({error})") from None
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    vocabulary = library.get_vocab(with_added_tokens=True)
    eos = _first_id(vocabulary, EOS_NAMES)
    if eos is None:
        raise ConfigError(f"data.tokenizer = '{path}': no end-of-document token; one of {', '.join(EOS_NAMES)}")
    bos, pad = _first_id(vocabulary, BOS_NAMES), _first_id(vocabulary, PAD_NAMES)
    return FileTokenizer(
        name=str(path),
        vocab_size=max(vocabulary.values()) + 1,
        bos=eos if bos is None else bos,
        eos=eos,
        pad=eos if pad is None else pad,
        fingerprint=hashlib.blake2b(content, digest_size=16).hexdigest(),
        library=library,
    )


def _first_id(vocabulary: dict[str, int], names: Sequence[str]) -> int | None:
    return next((vocabulary[name] for name in names if name in vocabulary), None)
