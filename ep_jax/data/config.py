"""Settings of the data pipeline. What they do is in `documents.py`, `tokenizer.py`, `packing.py` and `batches.py`."""

import dataclasses
from typing import ClassVar

from ep_jax.fields import ConfigError, check, setting

SOURCES = ("stdlib", "text", "jsonl", "arrayrecord")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which documents, how they become tokens, how they are packed into sequences."""

    SECTION: ClassVar[str] = "data"

    source: str = setting(
        "stdlib", doc="the running Python's own sources, text files, JSON lines, or prepared shards", choices=SOURCES
    )
    path: str = setting("", doc="file, folder or glob; for arrayrecord the prepared folder; unused for stdlib")
    jsonl_field: str = setting("text", doc="field of a JSON line that holds the text")
    tokenizer: str = setting("bytes", doc="'bytes', or the path of a Hugging Face tokenizer.json")
    sequence_length: int = setting(256, at_least=2, unit="tokens", doc="columns of a packed row")
    held_out_fraction: float = setting(
        0.05, above=0.0, at_most=0.5, doc="share of documents kept for evaluation, chosen by hash of the document"
    )
    cache_dir: str = setting("~/.cache/ep_jax", doc="tokens and packing indices of text sources are kept here")
    verify: bool = setting(True, doc="check the CRC-32 of every token file at the start (reads all of them once)")
    prefetch: int = setting(4, at_least=1, unit="batches", doc="batches prepared ahead of the step")

    def __post_init__(self):
        check(self)
        if self.source != "stdlib" and not self.path:
            raise ConfigError(f"data.path = '': needed for data.source = {self.source!r}; a file, folder or glob")
        if self.source == "jsonl" and not self.jsonl_field:
            raise ConfigError("data.jsonl_field = '': needed for data.source = 'jsonl'; the name of a field")
