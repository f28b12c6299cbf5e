"""The file format of routing traces, version 1: one .npz per step and process, checksummed, exact.

Letters: N layers, M microbatches of a step, S source shards in mesh order (an ep group is `ep` consecutive ones), T
tokens of a shard in one microbatch (whole packed rows), K choices, P stages (valid, sender, receiver), E experts.

A trace is a folder of `step_00000120.part0of1.npz`, or one such file. Each is a NumPy archive (a zip file: every array
carries a CRC-32, checked when it is read) of
  header      JSON text: the fields of `TraceHeader`, "version", and the names of the other "arrays"
  step        int64, the step (counted from 1) or the batch of an evaluation
  shards      int32 [s], which of the S source shards this part holds
  expert_ids  [N,M,s,T,K], uint8 up to 256 experts, else uint16
  weights     float32 [N,M,s,T,K], combine weights; exact, because the order "weight" ranks by them
  valid       bool [M,s,T]
  document    int64 [M,s,T], number of the token's document, -1 for padding
  position    int64 [M,s,T], input of the document (0 is its first), -1 for padding
  counts      int64 [N,P,E], what the run itself counted in this step over all shards; absent when nothing was counted
That is 5 or 6 bytes an assignment and 17 a token. Files appear whole or not at all. Starts no JAX backend.
"""

import dataclasses
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ep_jax.fields import ConfigError

VERSION = 1
NAME = re.compile(r"step_(\d+)\.part(\d+)of(\d+)\.npz")


class TraceError(ConfigError):
    """A trace that cannot be read: one line that names the file and what is wrong. Exit code 2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceHeader:
    """What holds for a whole trace."""

    num_experts: int
    sequence_length: int  # columns of a packed row; divides T
    ep: int  # shards of an ep group when it was recorded; divides S
    source: str  # where it comes from, for people: "training, run tiny", "synthetic document_skew sigma 1.47", ...
    order_known: bool = True  # False: only counts were known, so order-dependent policies cannot be told apart
    policy: dict[str, Any] | None = None  # the fields of the EPConfig behind `counts`


@dataclasses.dataclass(frozen=True, eq=False)
class TraceStep:
    """The routing of one step; NumPy arrays as in the file, of all shards or of one process's part."""

    header: TraceHeader
    step: int
    expert_ids_NMSTK: np.ndarray
    weights_NMSTK: np.ndarray
    valid_MST: np.ndarray
    document_MST: np.ndarray
    position_MST: np.ndarray
    counts_NPE: np.ndarray | None = None
    shards_S: np.ndarray | None = None  # which source shards these are; None: all of them

    def __post_init__(self):
        sizes = self.expert_ids_NMSTK.shape
        wanted = {"weights": sizes, "valid": sizes[1:4], "document": sizes[1:4], "position": sizes[1:4]}
        for name, size in wanted.items():
            [found] = [getattr(self, f.name).shape for f in dataclasses.fields(self) if f.name.startswith(name + "_")]
            if found != size:
                raise TraceError(
                    f"step {self.step}: {name} has shape {found}, expected {size} beside expert_ids {sizes}"
                )
        if sizes[3] % self.header.sequence_length:
            raise TraceError(
                f"step {self.step}: {sizes[3]} tokens of a shard, expected a multiple of sequence_length = "
                f"{self.header.sequence_length}"
            )

    @property
    def num_assignments(self) -> int:
        """Valid ones, over all layers."""
        layers, *_, choices = self.expert_ids_NMSTK.shape
        return int(self.valid_MST.sum()) * choices * layers


def id_type(num_experts: int) -> Any:
    """The dtype of expert ids in a file and on the way to it."""
    return np.uint8 if num_experts <= 256 else np.uint16


def write_step(folder: Path, part: TraceStep, *, index: int = 0, count: int = 1) -> Path:
    """Writes part `index` of `count` of a step, whole or not at all; returns the path.

    Raises OSError, and TraceError for an expert id that is not below num_experts or a weight that is not finite.
    """
    ids = part.expert_ids_NMSTK[:, part.valid_MST]
    if ids.size and not 0 <= ids.min() <= ids.max() < part.header.num_experts:
        highest = part.header.num_experts - 1
        raise TraceError(f"step {part.step}: found expert ids {ids.min()} to {ids.max()}, allowed are 0 to {highest}")
    if not np.isfinite(part.weights_NMSTK[:, part.valid_MST]).all():
        raise TraceError(f"step {part.step}: found a combine weight that is not finite")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{part.step:08d}.part{index}of{count}.npz"
    arrays: dict[str, Any] = {
        "step": np.int64(part.step),
        "shards": _shards_of(part).astype(np.int32),
        "expert_ids": part.expert_ids_NMSTK.astype(id_type(part.header.num_experts)),
        "weights": part.weights_NMSTK.astype(np.float32),
        "valid": part.valid_MST.astype(bool),
        "document": part.document_MST.astype(np.int64),
        "position": part.position_MST.astype(np.int64),
    }
    if part.counts_NPE is not None:
        arrays["counts"] = part.counts_NPE.astype(np.int64)
    header = {"version": VERSION, "arrays": list(arrays), **dataclasses.asdict(part.header)}
    arrays["header"] = np.array(json.dumps(header))
    scratch = path.with_suffix(".unfinished")
    with scratch.open("wb") as file:
        np.savez_compressed(file, **arrays)  # ids and weights shrink little, the rest to nothing
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    return path


class Trace:
    """A trace on disk: the header of its first step, its steps, and each step's routing when asked for."""

    def __init__(self, path: str | Path):
        """Raises TraceError when there is no trace, a part is missing, or parts belong to different traces."""
        self.path = Path(path).expanduser()
        files = [self.path] if self.path.is_file() else sorted(self.path.glob("step_*.npz"))
        if not files:
            raise TraceError(f"{path}: found no trace; allowed is a folder of step_*.part*of*.npz, or one such file")
        self._parts: dict[int, list[Path]] = {}
        for file in files:
            match = NAME.fullmatch(file.name)
            if not match:
                raise TraceError(f"{file}: found a name that is not of the form step_00000001.part0of1.npz")
            self._parts.setdefault(int(match[1]), []).append(file)
        for step, parts in self._parts.items():
            expected = int(parts[0].stem.rpartition("of")[2])
            if len(parts) != expected:
                raise TraceError(f"{self.path}: step {step}: expected {expected} parts, found {len(parts)}")
        self.header = _read_part(files[0]).header

    @property
    def steps(self) -> list[int]:
        """Recorded steps, ascending."""
        return sorted(self._parts)

    def read(self, step: int) -> TraceStep:
        """All shards of one step, in mesh order. Raises TraceError, also when a checksum does not fit."""
        parts = [_read_part(path) for path in self._parts[step]]
        first = parts[0]
        for path, part in zip(self._parts[step], parts, strict=True):
            # A run that went on under another policy or on another mesh is still one trace; each step has its header.
            kinds = [(h.num_experts, h.sequence_length, h.order_known) for h in (part.header, self.header)]
            if part.header != first.header or kinds[0] != kinds[1]:
                raise TraceError(f"{path}: found a part of another trace than the first file's")
        shards_S = np.concatenate([_shards_of(part) for part in parts])
        if sorted(shards_S.tolist()) != list(range(len(shards_S))):
            raise TraceError(f"{self.path}: step {step}: expected every source shard once, found {sorted(shards_S)}")
        order_S = np.argsort(shards_S)

        def joined(name: str, axis: int) -> np.ndarray:
            pieces = [getattr(part, name) for part in parts]
            if (np.diff(shards_S) == 1).all() and len(pieces) == 1:
                return pieces[0]
            return np.concatenate(pieces, axis=axis).take(order_S, axis=axis)

        return TraceStep(
            header=first.header,
            step=step,
            expert_ids_NMSTK=joined("expert_ids_NMSTK", 2),
            weights_NMSTK=joined("weights_NMSTK", 2),
            valid_MST=joined("valid_MST", 1),
            document_MST=joined("document_MST", 1),
            position_MST=joined("position_MST", 1),
            counts_NPE=first.counts_NPE,
        )

    def __iter__(self) -> Iterator[TraceStep]:
        return (self.read(step) for step in self.steps)

    def __len__(self) -> int:
        return len(self._parts)


def _shards_of(part: TraceStep) -> np.ndarray:
    return np.arange(part.valid_MST.shape[1]) if part.shards_S is None else part.shards_S


def _read_part(path: Path) -> TraceStep:
    try:
        # Members as a whole: NumPy stops where an array's own header says, before the checksum if that is damaged.
        with zipfile.ZipFile(path) as archive:
            members = {name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()}
        arrays = {
            name: np.lib.format.read_array(io.BytesIO(content), allow_pickle=False) for name, content in members.items()
        }
        header = json.loads(str(arrays["header"]))
        version = header.pop("version")
        if version != VERSION:
            raise TraceError(f"{path}: found version {version} of the trace format, allowed is {VERSION}")
        if set(header.pop("arrays")) != arrays.keys() - {"header"}:
            raise TraceError(f"{path}: expected a trace file, found it damaged (arrays {', '.join(arrays)})")
        if int(arrays["step"]) != int(path.stem.partition(".")[0].removeprefix("step_")):
            raise TraceError(f"{path}: found step {arrays['step']} inside, allowed is the step of its name")
        return TraceStep(
            header=TraceHeader(**header),
            step=int(arrays["step"]),
            expert_ids_NMSTK=arrays["expert_ids"],
            weights_NMSTK=arrays["weights"],
            valid_MST=arrays["valid"],
            document_MST=arrays["document"],
            position_MST=arrays["position"],
            counts_NPE=arrays.get("counts"),
            shards_S=arrays["shards"],
        )
    except TraceError:
        raise
    except (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise TraceError(f"{path}: expected a trace file, found it damaged or something else ({error})") from error
