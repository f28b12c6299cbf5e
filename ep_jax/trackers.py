"""Where a run's numbers are written: metrics.jsonl always, TensorBoard and wandb as configured, arrays beside them.

A run folder gets
  metrics.jsonl   one JSON object per logged step: `ep_jax.metrics.METRICS` and any further scalars (loss terms). What
                  is unknown or not finite is null. Each row is on disk before the run goes on. On resume the rows after
                  the resumed step go, and so does a last line that a crash cut short.
  arrays/         step_00000120.npz per logged step: the per-layer and per-expert counts of that row, int64. At most
                  ARRAY_FILES files: when there are more, every second one goes, so the whole run stays covered, ever
                  more coarsely.
  tensorboard/    the same scalars as events (log.tensorboard).

Only process 0 writes; the others get a tracker that does nothing. Not here: what the numbers are (`metrics.py`).
"""

import importlib
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ep_jax.fields import ConfigError
from ep_jax.metrics import LogConfig, plain

METRICS_FILE = "metrics.jsonl"
ARRAYS_FOLDER = "arrays"
TENSORBOARD_FOLDER = "tensorboard"
ARRAY_FILES = 256


class Tracker(Protocol):
    """A destination of scalars."""

    def log(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes one row: values are numbers or None, "step" need not be among them."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes the run's final values and closes. Nothing may be logged after it."""


def check_packages(config: LogConfig) -> None:
    """Raises ConfigError when a package the config asks for is not installed. Call it before anything is written."""
    if config.tensorboard and not installed("tensorboardX"):
        raise ConfigError("log.tensorboard = true: needs the package tensorboardX; install it, or allowed is false")
    if config.wandb_project and not installed("wandb"):
        raise ConfigError(
            f"log.wandb_project = {config.wandb_project!r}: needs the package wandb (extra `track`); install it, or "
            f"allowed is empty"
        )


def installed(package: str) -> bool:
    """Whether a package can be imported; a mere folder of that name, such as wandb's own output, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def open_tracker(
    config: LogConfig, run_dir: Path, *, resumed_step: int, run_config: Mapping[str, Any], process_index: int
) -> Tracker:
    """The tracker of a run: metrics.jsonl always, TensorBoard and wandb as configured, nothing on processes above 0.

    Args:
      resumed_step: last completed step of the checkpoint the run continues from, 0 for a new run; later rows are
        removed.
      run_config: the resolved configuration as nested plain values, shown by wandb.
    Raises ConfigError for a missing package or a damaged metrics.jsonl.
    """
    check_packages(config)
    if process_index != 0:
        return Trackers([])
    trackers: list[Tracker] = [JsonLines(run_dir / METRICS_FILE, resumed_step)]
    if config.tensorboard:
        trackers.append(TensorBoard(run_dir / TENSORBOARD_FOLDER, resumed_step))
    if config.wandb_project:
        trackers.append(WeightsAndBiases(config.wandb_project, run_dir, run_config))
    return Trackers(trackers)


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]):
        self.trackers = trackers

    def log(self, step: int, scalars: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(step, scalars)

    def finish(self, summary: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.finish(summary)


class JsonLines:
    """One JSON object a line, in step order, the file open only while one is written; `read_rows` reads it back."""

    def __init__(self, path: Path, resumed_step: int):
        """Keeps the rows up to `resumed_step` of a file that is there; what follows them is removed."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = [row for row in read_rows(path) if row["step"] <= resumed_step]
            scratch = path.with_suffix(".tmp")
            scratch.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            os.replace(scratch, path)

    def log(self, step: int, scalars: Mapping[str, Any]) -> None:
        row = {"step": step} | {name: plain(value) for name, value in scalars.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Nothing: the summary is no row, the run writes it to its own file."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file. A last line that a crash cut short is left out.

    Raises ConfigError naming file and line for any other line that is not an object with a step.
    """
    *lines, _ = path.read_text(encoding="utf-8").split(
        "\n"
    )  # what follows the last line end was cut short, or is empty
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict) or "step" not in row:
            raise ConfigError(f"{path} line {number} = {line[:40]!r}: expected a JSON object with a step")
        rows.append(row)
    return rows


class TensorBoard:
    """Scalars as TensorBoard events, through tensorboardX. None and non-finite values are left out."""

    def __init__(self, folder: Path, resumed_step: int):
        from tensorboardX import SummaryWriter

        # Readers drop the events of an earlier attempt from this step on.
        purge_step = resumed_step + 1 if resumed_step else None
        self.writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)

    def log(self, step: int, scalars: Mapping[str, Any]) -> None:
        for name, value in scalars.items():
            if name != "step" and plain(value) is not None:
                self.writer.add_scalar(name, plain(value), step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        del summary
        self.writer.close()


class WeightsAndBiases:
    """Scalars to a wandb project; a resumed run folder continues its wandb run.

    wandb reads its own settings. It cannot take rows back: those after the resumed step stay as first logged.
    """

    def __init__(self, project: str, run_dir: Path, run_config: Mapping[str, Any]):
        wandb = importlib.import_module("wandb")
        identity = run_dir / "wandb_id.txt"
        if not identity.exists():
            identity.write_text(wandb.util.generate_id(), encoding="utf-8")
        self.run = wandb.init(
            project=project,
            dir=str(run_dir),
            name=run_dir.name,
            id=identity.read_text(encoding="utf-8").strip(),
            resume="allow",
            config=dict(run_config),
        )

    def log(self, step: int, scalars: Mapping[str, Any]) -> None:
        self.run.log({name: plain(value) for name, value in scalars.items()}, step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.run.summary.update(dict(summary))
        self.run.finish()


class ArrayFiles:
    """Per-layer and per-expert arrays of logged steps, one .npz each, at most `limit` of them."""

    def __init__(self, folder: Path, *, resumed_step: int, process_index: int, limit: int = ARRAY_FILES):
        """Files after `resumed_step` are removed. Processes above 0 write nothing."""
        self.folder, self.limit, self.writes = folder, limit, process_index == 0
        if self.writes:
            folder.mkdir(parents=True, exist_ok=True)
            for path in self.paths():
                if int(path.stem.removeprefix("step_")) > resumed_step:
                    path.unlink()

    def paths(self) -> list[Path]:
        return sorted(self.folder.glob("step_*.npz"))

    def write(self, step: int, arrays: Mapping[str, Any]) -> None:
        """Writes the arrays of one step whole or not at all; integers as int64."""
        if not self.writes:
            return
        wide: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
        wide = {name: a.astype(np.int64) if np.issubdtype(a.dtype, np.integer) else a for name, a in wide.items()}
        scratch = self.folder / "unfinished.tmp"
        with scratch.open("wb") as file:
            np.savez_compressed(file, **wide)
        os.replace(scratch, self.folder / f"step_{step:08d}.npz")
        paths = self.paths()
        if len(paths) > self.limit:
            for path in paths[-2::-2]:  # the newest stays
                path.unlink()
