"""The packing index: every input once, documents cut only where they must be, few columns wasted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_jax.data.packing import best_fit_decreasing, cached_packing, pack, packing_name


def naive_best_fit_rows(sizes, capacity):
    """Number of rows by the textbook loop."""
    free = []
    for size in sorted(sizes, reverse=True):
        fitting = [i for i, space in enumerate(free) if space >= size]
        if fitting:
            free[min(fitting, key=lambda i: free[i])] -= size
        else:
            free.append(capacity - size)
    return len(free)


@given(st.integers(1, 20).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))))
def test_best_fit_equals_the_textbook_loop(case):
    capacity, sizes = case
    rows, columns = best_fit_decreasing(np.array(sizes, np.int64), capacity)
    used = {(row, column + i) for row, column, size in zip(rows, columns, sizes, strict=True) for i in range(size)}
    assert len(used) == sum(sizes)  # no two items share a column
    assert all(0 <= column < capacity for _, column in used)
    assert sorted(set(rows.tolist())) == list(range(naive_best_fit_rows(sizes, capacity)))
    for row in set(rows.tolist()):  # no hole before the padding
        assert {c for r, c in used if r == row} == set(range(sum(r == row for r, _ in used)))


@pytest.mark.parametrize("capacity", [2, 7, 16])
def test_every_free_space_is_filled_again(capacity):
    """Pairs that fill a row exactly, and many random sizes, take as few rows as the textbook loop."""
    for first in range(1, capacity):
        rows, _ = best_fit_decreasing(np.array([first, capacity - first] * 30), capacity)
        assert rows.max() == naive_best_fit_rows([first, capacity - first] * 30, capacity) - 1
    sizes = np.random.default_rng(0).integers(1, capacity + 1, 500)
    assert best_fit_decreasing(sizes, capacity)[0].max() == naive_best_fit_rows(sizes.tolist(), capacity) - 1


@pytest.mark.parametrize("length", [31, 32, 33, 256, 257, 264])
def test_rows_of_one_document(length):
    """A document of n tokens has n + 1 inputs (BOS first), so n = L - 1 is exactly one full row."""
    packing = pack(np.array([7]), np.array([length]), 32)
    assert packing.num_rows == -(-(length + 1) // 32)
    assert packing.num_inputs == length + 1
    assert packing.document.tolist() == [7] * packing.num_rows
    assert packing.start.tolist() == list(range(0, length + 1, 32))


def test_documents_that_fit_a_row_are_never_cut_and_little_is_wasted():
    lengths = np.random.default_rng(0).integers(1, 4 * 128, 20_000)
    packing = pack(np.arange(20_000), lengths, 128)
    pieces = np.bincount(packing.document)
    np.testing.assert_array_equal(pieces, -(-(lengths + 1) // 128))
    assert packing.num_rows * 128 / packing.num_inputs < 1.001


def test_a_document_without_tokens_is_a_wrong_call():
    with pytest.raises(ValueError, match="0 tokens"):
        pack(np.arange(2), np.array([3, 0]), 8)


def test_no_documents_give_no_rows():
    assert pack(np.arange(0), np.arange(0), 8).num_rows == 0


def test_index_is_cached_keyed_by_its_inputs_and_computed_again_when_damaged(tmp_path):
    documents, lengths = np.arange(5), np.array([3, 9, 30, 1, 7])
    first = cached_packing(documents, lengths, 8, [tmp_path / "prepared", tmp_path / "cache"])
    (file,) = (tmp_path / "cache").iterdir()
    assert packing_name(documents, lengths, 8) == file.name
    for other in ((documents, lengths, 9), (documents + 1, lengths, 8), (documents, lengths + 1, 8)):
        assert packing_name(*other) != file.name

    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    for damage in (bytes(content), bytes(content[:100]), b""):
        file.write_bytes(damage)
        again = cached_packing(documents, lengths, 8, [tmp_path / "cache"])
        for mine, theirs in zip(first, again, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [file.name]


def test_an_index_in_the_cache_is_used(tmp_path):
    """A planted index under the right name comes back, so nothing was computed."""
    documents, lengths = np.arange(2), np.array([3, 5])
    planted = pack(documents, lengths, 4)
    with (tmp_path / packing_name(documents, lengths, 8)).open("wb") as file:
        np.savez(file, **planted._asdict())
    assert cached_packing(documents, lengths, 8, [tmp_path]).num_rows == planted.num_rows
