"""Packed rows of one half of the documents as NumPy arrays, and the order in which training visits them.

Letters: N rows asked for, L columns. This file knows nothing of steps, meshes, processes or JAX.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from ep_jax.data.packing import Packing
from ep_jax.data.store import TokenStore
from ep_jax.fields import ConfigError


class Batch(NamedTuple):
    """Rows of tokens; [N, L] NumPy arrays here, global jax.Arrays [M, B/M, L] for the step.

    Validity is told by `valid` alone: any id, the pad id too, may be a real token.
    """

    tokens: Any  # int32, inputs
    targets: Any  # int32, the token after each input
    valid: Any  # bool, False for padding
    segments: Any  # int32, 1, 2, ... for the documents of a row in order, 0 for padding
    positions: Any  # int32, 0, 1, ... within each segment, 0 for padding


@dataclasses.dataclass(frozen=True, eq=False)
class Sequences:
    """The packed rows of some documents of a store."""

    store: TokenStore
    documents: np.ndarray  # int64 [documents of this half], numbers in the store
    packing: Packing
    sequence_length: int
    fingerprint: str  # hex; equal exactly when all rows are equal

    @property
    def num_rows(self) -> int:
        return self.packing.num_rows

    @property
    def num_inputs(self) -> int:
        """Valid (input, target) pairs of all rows."""
        return self.packing.num_inputs

    def batch(self, rows: np.ndarray) -> Batch:
        """The given rows (integers [N]; -1 gives a row of padding) as a Batch of [N, L].

        Raises ConfigError when a token is not below the tokenizer's vocabulary size, IndexError for a row not there.
        """
        shape = (len(rows), self.sequence_length)
        pad = self.store.manifest.tokenizer.pad
        batch = Batch(
            tokens=np.full(shape, pad, np.int32),
            targets=np.full(shape, pad, np.int32),
            valid=np.zeros(shape, bool),
            segments=np.zeros(shape, np.int32),
            positions=np.zeros(shape, np.int32),
        )
        for i, row in enumerate(rows.tolist()):
            if row >= self.num_rows or row < -1:
                raise IndexError(f"row {row} of {self.num_rows}")
            if row >= 0:
                self._fill(Batch(*(array[i] for array in batch)), row)
        return batch

    def origins(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the tokens of rows (integers [N]; -1 is a row of padding) come from, int64 [N,L] each.

        The number of the token's document in the store, and which input of it the token is (0 is BOS); -1 for padding.
        """
        document = np.full((len(rows), self.sequence_length), -1, np.int64)
        position = document.copy()
        for i, row in enumerate(rows.tolist()):
            for piece in range(*self.packing.row_starts[row : row + 2].tolist()) if row >= 0 else ():
                start, length = int(self.packing.start[piece]), int(self.packing.length[piece])
                here = slice(int(self.packing.column[piece]), int(self.packing.column[piece]) + length)
                document[i, here] = self.packing.document[piece]
                position[i, here] = np.arange(start, start + length)
        return document, position

    def _fill(self, columns: Batch, row: int) -> None:
        """Writes one row's pieces into its columns [L]."""
        packing = self.packing
        first, last = packing.row_starts[row : row + 2].tolist()
        for segment, piece in enumerate(range(first, last), start=1):
            length, column = int(packing.length[piece]), int(packing.column[piece])
            window = self._window(int(packing.document[piece]), int(packing.start[piece]), length)
            here = slice(column, column + length)
            columns.tokens[here] = window[:-1]
            columns.targets[here] = window[1:]
            columns.valid[here] = True
            columns.segments[here] = segment
            columns.positions[here] = np.arange(length)

    def _window(self, document: int, start: int, length: int) -> np.ndarray:
        """Ids start to start + length (one more than `length`) of BOS + tokens + EOS; int32."""
        tokenizer = self.store.manifest.tokenizer
        num_tokens = int(self.store.lengths[document])
        tokens = self.store.read(document, max(start - 1, 0), min(start + length, num_tokens))
        if tokens.size and tokens.max() >= tokenizer.vocab_size:
            raise ConfigError(
                f"data: {self.store.folder}: document {document}: found token id {tokens.max()}, needed below the "
                f"tokenizer's {tokenizer.vocab_size}"
            )
        window = np.empty(length + 1, np.int32)
        at = 0
        if start == 0:
            window[0], at = tokenizer.bos, 1
        window[at : at + tokens.size] = tokens
        if start + length == num_tokens + 1:
            window[-1] = tokenizer.eos
        return window


def rows_at(positions: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
    """The row at each global sequence position (int64, any shape): epoch after epoch, each a shuffle of all rows.

    A function of (seed, position) alone. Position p is in epoch p // num_rows.
    """
    epochs, indices = np.divmod(positions, num_rows)
    rows = np.empty_like(indices)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        rows[here] = _shuffled(num_rows, seed, epoch)[indices[here]]
    return rows


@functools.lru_cache(maxsize=8)
def _shuffled(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the rows: sorted by a 64-bit hash that is a bijection, so keys never tie.

    Spelled out in integers, so that it is the same under every version of every library.
    """
    key = _mix(_mix(np.uint64(seed % 2**64)) ^ np.uint64(epoch))
    return np.argsort(_mix(np.arange(num_rows, dtype=np.uint64) ^ key), kind="stable")


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    """The finaliser of the SplitMix64 generator: a bijection of 64-bit integers (modulo 2^64)."""
    x = np.atleast_1d(x) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
