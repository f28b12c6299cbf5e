"""Trace files: exact there and back, parts joined in mesh order, damage and mix-ups refused, whole or not at all.

Run: python -m pytest tests/traces/test_file.py
"""

import dataclasses
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ep_jax.traces import Trace, TraceError, TraceHeader, TraceStep, write_step

LAYERS, MICROBATCHES, SHARDS, TOKENS, CHOICES = 2, 2, 3, 8, 3
HEADER = TraceHeader(
    num_experts=300,
    sequence_length=4,
    ep=3,
    source="made here",
    order_known=False,
    policy={"transport": "ring", "sender_factor": 1.15, "rescale": False},
)


def make_step(step: int = 7, header: TraceHeader = HEADER, shards: int = SHARDS) -> TraceStep:
    """Every bit is random: weights of any sign and size, subnormal too, and numbers that need 64 bits."""
    rng = np.random.default_rng(step)
    shape = (LAYERS, MICROBATCHES, shards, TOKENS, CHOICES)
    bits = rng.integers(2**32, size=shape, dtype=np.uint32)
    bits[..., 0] &= 0x807FFFFF  # subnormal
    weights = np.where(np.isfinite(bits.view(np.float32)), bits, 0).astype(np.uint32).view(np.float32)
    return TraceStep(
        header=header,
        step=step,
        expert_ids_NMSTK=rng.integers(header.num_experts, size=shape),
        weights_NMSTK=weights,
        valid_MST=rng.random(shape[1:4]) < 0.8,
        document_MST=rng.integers(-1, 2**40, size=shape[1:4]),
        position_MST=rng.integers(-1, 2**40, size=shape[1:4]),
        counts_NPE=rng.integers(2**40, size=(LAYERS, 3, header.num_experts)),
    )


def part_of(step: TraceStep, shards: list[int]) -> TraceStep:
    arrays = {
        name: getattr(step, name)[:, :, shards] if "N" in name else getattr(step, name)[:, shards]
        for name in ("expert_ids_NMSTK", "weights_NMSTK", "valid_MST", "document_MST", "position_MST")
    }
    return dataclasses.replace(step, shards_S=np.array(shards), **arrays)


def assert_same(found: TraceStep, wanted: TraceStep) -> None:
    """To the bit: floats are compared as integers."""
    assert (found.header, found.step, found.shards_S) == (wanted.header, wanted.step, None)
    for field in dataclasses.fields(TraceStep)[2:-1]:
        mine, theirs = getattr(found, field.name), getattr(wanted, field.name)
        if theirs is None:
            assert mine is None
            continue
        if mine.dtype == np.float32:
            mine, theirs = mine.view(np.uint32), theirs.view(np.uint32)
        np.testing.assert_array_equal(mine, theirs, err_msg=field.name, strict=field.name != "expert_ids_NMSTK")


@pytest.fixture
def written(tmp_path) -> Path:
    return write_step(tmp_path / "trace", make_step())


# --- there and back ---------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
    steps = [make_step(step) for step in (12, 3, 100)]
    for step in steps:
        write_step(tmp_path, step)
    trace = Trace(tmp_path)
    assert (trace.steps, len(trace), trace.header) == ([3, 12, 100], 3, HEADER)
    for found, wanted in zip(trace, sorted(steps, key=lambda step: step.step), strict=True):
        assert_same(found, wanted)
        assert found.expert_ids_NMSTK.max() > 255


def test_one_file_is_a_trace(written):
    assert_same(Trace(written).read(7), make_step())


def test_without_counts(tmp_path):
    step = dataclasses.replace(make_step(), counts_NPE=None)
    write_step(tmp_path, step)
    assert_same(Trace(tmp_path).read(7), step)


@pytest.mark.parametrize(("experts", "dtype", "assignment_bytes"), [(256, np.uint8, 5), (257, np.uint16, 6)])
def test_bytes_of_an_assignment(tmp_path, experts, dtype, assignment_bytes):
    """Random content, which nothing compresses: at most what the format's header says, and what names cost."""
    step = dataclasses.replace(make_step(header=dataclasses.replace(HEADER, num_experts=experts)), counts_NPE=None)
    path = write_step(tmp_path, step)
    found = Trace(tmp_path).read(7).expert_ids_NMSTK
    assert found.dtype == dtype
    assert found.max() > 240
    said = found.size * assignment_bytes + step.valid_MST.size * 17
    assert path.stat().st_size < said + 8 * 350  # 8 members, each with two zip headers and a NumPy one


def test_parts_are_joined_in_mesh_order(tmp_path):
    step = make_step(shards=6)
    for index, shards in enumerate(([4, 1], [0, 5], [3, 2])):
        write_step(tmp_path, part_of(step, shards), index=index, count=3)
    assert_same(Trace(tmp_path).read(7), step)


def test_shards_of_one_part_are_put_in_mesh_order(tmp_path):
    write_step(tmp_path, part_of(make_step(), [2, 0, 1]))
    assert_same(Trace(tmp_path).read(7), make_step())


def test_valid_assignments_are_counted_over_layers():
    step = make_step()
    assert step.num_assignments == sum(CHOICES * LAYERS for valid in step.valid_MST.reshape(-1) if valid)


# --- refused ----------------------------------------------------------------------------------------------------------


def refused(path: Path, message: str, step: int = 7) -> None:
    with pytest.raises(TraceError, match=message) as error:
        Trace(path).read(step)
    assert "\n" not in str(error.value)


def test_nothing_there(tmp_path):
    refused(tmp_path, f"{tmp_path}: found no trace")
    refused(tmp_path / "missing", "missing: found no trace")


def test_a_missing_part(tmp_path):
    step = make_step()
    write_step(tmp_path, part_of(step, [0, 2]), index=0, count=2)
    refused(tmp_path, f"{tmp_path}: step 7: expected 2 parts, found 1")
    refused(tmp_path / "step_00000007.part0of2.npz", "expected 2 parts, found 1")


def test_parts_with_the_same_shard_or_a_hole(tmp_path):
    step = make_step()
    for second in ([2, 1], [1]):  # 2 twice; and nobody has 3 of 0, 2, 3
        write_step(tmp_path, part_of(step, [0, 2]), index=0, count=2)
        write_step(
            tmp_path,
            dataclasses.replace(part_of(step, second), shards_S=np.arange(2, 2 + len(second))),
            index=1,
            count=2,
        )
        refused(tmp_path, "step 7: expected every source shard once")


def test_a_part_of_another_trace(tmp_path):
    step = make_step()
    write_step(tmp_path, part_of(step, [0, 2]), index=0, count=2)
    other = dataclasses.replace(step, header=dataclasses.replace(HEADER, policy={"transport": "dense"}))
    path = write_step(tmp_path, part_of(other, [1]), index=1, count=2)
    refused(tmp_path, f"{path}: found a part of another trace")


def test_a_step_of_another_trace(tmp_path):
    write_step(tmp_path, make_step())
    path = write_step(tmp_path, make_step(8, dataclasses.replace(HEADER, num_experts=301)))
    refused(tmp_path, f"{path}: found a part of another trace", step=8)


@pytest.mark.parametrize("name", ["step_7.npz", "step_00000007.part0of1.copy.npz", "step_x.part0of1.npz"])
def test_a_wrong_name(written, name):
    written.rename(written.with_name(name))
    refused(written.parent, f"{name}: found a name that is not of the form")


def test_a_file_under_the_name_of_another_step(written):
    other = written.rename(written.with_name("step_00000008.part0of1.npz"))
    refused(written.parent, f"{other}: found step 7", step=8)


def test_another_version(written):
    with zipfile.ZipFile(written) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(str(np.load(io.BytesIO(members["header.npy"]))))
    buffer = io.BytesIO()
    np.save(buffer, np.array(json.dumps(header | {"version": 2})))
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in (members | {"header.npy": buffer.getvalue()}).items():
            archive.writestr(name, content)
    refused(written, f"{written}: found version 2 of the trace format, allowed is 1")


@pytest.fixture
def small(tmp_path) -> Path:
    """A trace of one layer, shard and row, so that each of its bytes can be damaged."""
    step = part_of(make_step(header=dataclasses.replace(HEADER, num_experts=8)), [0])
    arrays = {
        field.name: getattr(step, field.name)[:1] for field in dataclasses.fields(step) if field.name.endswith("STK")
    }
    arrays |= {name: getattr(step, name)[:, :, :4] for name in ("valid_MST", "document_MST", "position_MST")}
    return write_step(
        tmp_path, dataclasses.replace(step, **{n: a[..., :4, :] if "K" in n else a for n, a in arrays.items()})
    )


def test_a_flipped_bit(small):
    """A bit of every second byte, in turn: refused with the file's name, or without any effect on what is read.

    Without effect are dates, attributes and the like; in each array's own bytes flips must be noticed.
    """
    content, trace = small.read_bytes(), Trace(small)
    step = trace.read(7)
    with zipfile.ZipFile(small) as archive:
        entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
    arrays = "header step shards expert_ids weights valid document position counts"
    assert sorted(entries) == sorted(arrays.split())
    errors = {}
    for place in range(0, len(content), 2):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place // 2 % 8
        small.write_bytes(damaged)
        try:
            assert_same(trace.read(7), step)
        except TraceError as error:
            errors[place] = str(error)
    assert all(text.startswith(f"{small}: ") for text in errors.values())
    for name, entry in entries.items():
        lengths = content[entry.header_offset + 26 :][:4]  # of name and extra field
        start = entry.header_offset + 30 + sum(np.frombuffer(lengths, "<u2").tolist())
        places = range(start + start % 2, start + entry.compress_size, 2)
        # A compressed stream has some bits that mean nothing, at its end and in its table of codes.
        assert sum(place in errors for place in places) > 0.8 * len(places), name


def test_a_truncated_file(small):
    content, trace = small.read_bytes(), Trace(small)
    for length in range(0, len(content), 5):
        small.write_bytes(content[:length])
        with pytest.raises(TraceError, match=f"^{small}: expected a trace file, found it damaged"):
            trace.read(7)
    refused(small, f"{small}: expected a trace file, found it damaged")


def test_shapes_that_do_not_fit():
    step = make_step()
    with pytest.raises(TraceError, match="step 7: valid has shape"):
        dataclasses.replace(step, valid_MST=step.valid_MST[:, :1])
    with pytest.raises(TraceError, match="8 tokens of a shard, expected a multiple of sequence_length = 5"):
        dataclasses.replace(step, header=dataclasses.replace(HEADER, sequence_length=5))


# --- whole or not at all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [False, True])
def test_a_crash_before_the_rename_leaves_what_was_there(tmp_path, monkeypatch, earlier):
    old = dataclasses.replace(make_step(8), step=7)
    if earlier:
        write_step(tmp_path, old)
    with monkeypatch.context() as patched:

        def crash(*_):
            raise KeyboardInterrupt

        patched.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            write_step(tmp_path, make_step())
    assert len(list(tmp_path.iterdir())) == 1 + earlier  # what was written so far has a name of its own
    if earlier:
        assert_same(Trace(tmp_path).read(7), old)
    else:
        refused(tmp_path, "found no trace")
    write_step(tmp_path, make_step())
    assert_same(Trace(tmp_path).read(7), make_step())
    assert len(list(tmp_path.iterdir())) == 1
