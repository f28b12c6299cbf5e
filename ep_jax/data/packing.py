"""Documents into rows of L columns, computed once as an index: row -> pieces (document, start, length, column).

A document of n tokens is BOS + tokens + EOS; its n + 1 inputs are all but the last of these, its targets all but the
first. Every whole L inputs of a document are a piece with a row of their own; the rest of it, shorter than L, is packed
with the rests of others by best fit decreasing: longest first, each into the fullest row that still holds it. So a
document is cut only where it is longer than a row, and padding is at row ends only. No piece of this depends on a mesh,
a process count or a seed. This file reads no tokens.

Letters: R rows, P pieces, L columns of a row.
"""

import hashlib
import os
import secrets
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

VERSION = 1  # of the algorithm: part of the cache key


class Packing(NamedTuple):
    """The pieces of row r are row_starts[r] to row_starts[r + 1], in order of their columns."""

    row_starts: np.ndarray  # int64 [R + 1]
    document: np.ndarray  # int64 [P], number in the store
    start: np.ndarray  # int64 [P], first input of the document in this piece; input 0 is BOS
    length: np.ndarray  # int32 [P], inputs
    column: np.ndarray  # int32 [P], where the piece begins in its row

    @property
    def num_rows(self) -> int:
        return len(self.row_starts) - 1

    @property
    def num_inputs(self) -> int:
        """Non-padding columns of all rows, each with one target."""
        return int(self.length.sum())


def pack(documents: np.ndarray, lengths: np.ndarray, sequence_length: int) -> Packing:
    """Packs the given documents (int64 numbers) with `lengths` tokens each, BOS and EOS not counted.

    Raises ValueError for a document without tokens.
    """
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"a document of {lengths.min()} tokens cannot be packed; at least 1 is needed")
    inputs = lengths + 1
    whole, rest = np.divmod(inputs, sequence_length)
    num_whole = int(whole.sum())
    whole_of = np.repeat(np.arange(len(documents)), whole)
    whole_index = np.arange(num_whole) - np.repeat(np.cumsum(whole) - whole, whole)
    rest_of = np.flatnonzero(rest)
    rest_row, rest_column = best_fit_decreasing(rest[rest_of], sequence_length)

    row = np.concatenate([np.arange(num_whole), num_whole + rest_row])
    column = np.concatenate([np.zeros(num_whole, np.int64), rest_column])
    order = np.lexsort((column, row))
    num_rows = int(row.max()) + 1 if len(row) else 0
    length = np.concatenate([np.full(num_whole, sequence_length), rest[rest_of]])
    start = np.concatenate([whole_index, whole[rest_of]]) * sequence_length
    return Packing(
        row_starts=np.searchsorted(row[order], np.arange(num_rows + 1)),
        document=documents[np.concatenate([whole_of, rest_of])][order],
        start=start[order],
        length=length[order].astype(np.int32),
        column=column[order].astype(np.int32),
    )


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column (int64 [n] each) of items of `sizes` (1 to capacity) in rows of `capacity`.

    Largest first, ties by index; each goes into the row with the least free space that holds it, else into a new one.
    Rows are kept by their free space, and all items of one size are placed together, so the work grows with the
    number of different sizes and not with items times rows.
    """
    order = np.argsort(-sizes, kind="stable")
    rows, columns = np.empty(len(sizes), np.int64), np.empty(len(sizes), np.int64)
    rows_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # free space -> rows that have it
    occupied = np.zeros(capacity + 1, bool)  # the spaces that some row has
    num_rows, placed = 0, 0
    for size, count in zip(*(values[::-1].tolist() for values in np.unique(sizes, return_counts=True)), strict=True):
        end = placed + count
        # Placing as many as fit leaves less than `size` free, so no row found here comes up twice.
        for space in [*(np.flatnonzero(occupied[size:]) + size).tolist(), capacity]:
            if placed == end:
                break
            per_row = space // size
            wanted = -(-(end - placed) // per_row)
            if space == capacity:
                rows_with[space] = list(range(num_rows, num_rows + wanted))
                num_rows += wanted
            chosen = rows_with[space][-wanted:]
            del rows_with[space][-wanted:]
            occupied[space] = bool(rows_with[space])
            items = order[placed : min(end, placed + len(chosen) * per_row)]
            placed += len(items)
            rows[items] = np.repeat(chosen, per_row)[: len(items)]
            columns[items] = capacity - space + size * (np.arange(len(items)) % per_row)
            in_last = len(items) - (len(chosen) - 1) * per_row
            for left, members in ((space - per_row * size, chosen[:-1]), (space - in_last * size, chosen[-1:])):
                if left and members:
                    rows_with[left].extend(members)
                    occupied[left] = True
    return rows, columns


def packing_key(documents: np.ndarray, lengths: np.ndarray, sequence_length: int) -> str:
    """Hex text that changes with anything the packing depends on."""
    key = hashlib.blake2b(f"{VERSION} {sequence_length} {len(documents)} ".encode(), digest_size=12)
    key.update(documents.astype("<i8").tobytes())
    key.update(lengths.astype("<i8").tobytes())
    return key.hexdigest()


def cached_packing(
    documents: np.ndarray, lengths: np.ndarray, sequence_length: int, folders: Sequence[Path]
) -> Packing:
    """The packing from the first of `folders` that has it, else computed and kept in the last one.

    A damaged index is computed again. A folder that cannot be written is no error: the index is computed each time.
    """
    name = packing_name(documents, lengths, sequence_length)
    for folder in folders:
        packing = _load(folder / name)
        if packing is not None:
            return packing
    packing = pack(documents, lengths, sequence_length)
    save_packing(folders[-1], name, packing)
    return packing


def packing_name(documents: np.ndarray, lengths: np.ndarray, sequence_length: int) -> str:
    """File name of a packing index."""
    return f"packing-{packing_key(documents, lengths, sequence_length)}.npz"


def save_packing(folder: Path, name: str, packing: Packing) -> None:
    """Writes the index under a temporary name and renames it."""
    temporary = folder / f".{name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            np.savez(file, **packing._asdict())
        temporary.replace(folder / name)
    except OSError:
        temporary.unlink(missing_ok=True)


def _load(path: Path) -> Packing | None:
    try:
        with path.open("rb") as file, np.load(file) as content:  # a zip file: each member's CRC-32 is checked
            return Packing(**{name: content[name] for name in Packing._fields})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
