"""What the stages left: rows for a result file as in benchmarks/, and a summary to read."""

import dataclasses
import json
import shlex
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ep_jax.trackers import read_rows
from tools.bench.layers import HEADER, table_row
from tools.ep8.run import FAILED, STOPPED, Outcome, last_lines
from tools.ep8.stages import Stage

TRAINING_KEPT = ("step", "loss", "drop_rate", "drop_rate_sender", "drop_rate_receiver", "step_ms", "tokens_per_second")
TRAINING_KEPT += ("mfu", "peak_memory_bytes")
LOG_LINES = 12  # of a stage that did not end well


@dataclasses.dataclass(frozen=True)
class Finished:
    """A stage, what became of it, and its rows."""

    stage: Stage
    outcome: Outcome
    log: Path
    rows: list[dict[str, Any]]

    @property
    def command(self) -> str:
        return shlex.join(["python", *self.stage.arguments])


def rows_of(stage: Stage) -> list[dict[str, Any]]:
    """The rows of a stage's result, each with the stage's name; empty where there is no result, or half of one."""
    read = _training if stage.trains else _tests if stage.result.suffix == ".xml" else _bench
    try:
        return [{"stage": stage.name} | row for row in read(stage)]
    except (OSError, ValueError, ElementTree.ParseError):  # its process was ended before or while it wrote
        return []


def _training(stage: Stage) -> list[dict[str, Any]]:
    if not stage.metrics.exists():
        return []
    rows = [{name: row.get(name) for name in TRAINING_KEPT} for row in read_rows(stage.metrics)]
    return [{"steps_asked_for": stage.steps, "training": rows}] if rows else []


def _bench(stage: Stage) -> list[dict[str, Any]]:
    content = json.loads(stage.result.read_text(encoding="utf-8"))
    return [row | {"added_flags": content["devices"]["added_flags"]} for row in content["results"]]


def _tests(stage: Stage) -> list[dict[str, Any]]:
    rows = []
    for case in ElementTree.parse(stage.result).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        row = {"test": case.get("name"), "seconds": float(case.get("time", 0)), "outcome": "passed"}
        if bad:
            row |= {"outcome": bad[0].tag, "message": " ".join(bad[0].get("message", "").split())[:300]}
        rows.append(row)
    return rows


def write_json(path: Path, date: str, devices: dict[str, Any], finished: Sequence[Finished]) -> None:
    """The result file, in the layout that `tools.bench table` reads."""
    content = {
        "date": date,
        "commands": [one.command for one in finished],
        "devices": devices | {"used_devices": devices["devices"]},
        "stages": {one.stage.name: dataclasses.asdict(one.outcome) for one in finished},
        "results": [row for one in finished for row in one.rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_logs(path: Path, finished: Sequence[Finished]) -> None:
    """One archive of all logs and results."""
    with tarfile.open(path, "w:gz") as archive:
        for one in finished:
            archive.add(one.log, one.log.name)
            result = one.stage.metrics if one.stage.trains else one.stage.result
            if result.exists():
                archive.add(result, f"{one.stage.name}_{result.name}" if one.stage.trains else result.name)


def summary(finished: Sequence[Finished]) -> str:
    """Every stage's figures, then the trainings beside each other, and a line a stage on what became of it."""
    return "\n\n".join([*map(figures, finished), outcomes(finished)]) + "\n"


def outcomes(finished: Sequence[Finished]) -> str:
    """The end of the summary."""
    curves = comparison(finished)
    states = "\n".join(f"{one.stage.name:<20}{one.outcome}" for one in finished)
    return (f"== trainings\n{curves}\n\n" if curves else "") + f"== stages\n{states}"


def figures(one: Finished) -> str:
    """A stage's part of the summary."""
    lines = [f"== {one.stage.name}: {one.outcome}"]
    layers = [row for row in one.rows if "variant" in row]
    if layers:
        lines.append(HEADER)
    for row in one.rows:
        if "test" in row and row["outcome"] != "passed":
            lines.append(f"{row['outcome']}: {row['test']}: {row['message']}")
        elif "failed" in row:
            lines.append(f"{row['shape']:<6}{row['routing'][:9]:<10}{row['variant']:<44} failed: {row['failed']}")
        elif "variant" in row:
            lines.append(table_row(row))
        elif "gb_per_s" in row:
            ms, rows = row["times"]["median_ms"], row["rows"]
            lines.append(f"{row['shape']:<6}all_to_all of {rows:,} rows: {ms:.3f} ms, {row['gb_per_s']:.0f} GB/s")
    tests = [row for row in one.rows if "test" in row]
    if tests:
        lines.append(f"{sum(row['outcome'] == 'passed' for row in tests)} of {len(tests)} passed")
    if one.outcome.state in (FAILED, STOPPED):
        lines += ["end of its log:", last_lines(one.log, LOG_LINES)]
    return "\n".join(lines)


def comparison(finished: Sequence[Finished]) -> str:
    """Losses and drop rates of the trainings, at the last step that all of them reported and at each one's own last."""
    curves = {one.stage.name: one.rows[0]["training"] for one in finished if one.stage.trains and one.rows}
    if not curves:
        return ""
    common = set.intersection(*({row["step"] for row in rows} for rows in curves.values()))
    lines = [f"{'':<20}{'step':>6}{'loss':>9}{'drop %':>9}{'step ms':>10}{'tokens/s':>12}{'MFU %':>8}"]
    for name, rows in curves.items():
        wanted = sorted({max(common, default=rows[-1]["step"]), rows[-1]["step"]})
        lines += [_curve_point(name, row) for row in rows if row["step"] in wanted]
    return "\n".join(lines)


def _curve_point(name: str, row: dict[str, Any]) -> str:
    def number(value: float | None, width: int, digits: int = 1) -> str:
        return f"{'-':>{width}}" if value is None else f"{value:{width},.{digits}f}"

    mfu = None if row["mfu"] is None else 100 * row["mfu"]
    return (
        f"{name:<20}{row['step']:>6}{row['loss']:>9.4f}{100 * row['drop_rate']:>9.3f}{number(row['step_ms'], 10)}"
        f"{number(row['tokens_per_second'], 12, 0)}{number(mfu, 8)}"
    )
