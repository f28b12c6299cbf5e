"""What became of a sweep's members: rows from their folders, sweep.jsonl and sweep.csv, a table and a figure.

Loss and drops are those of the held-out evaluation at a run's end. Running members is in `sweep.py`; matplotlib is
needed for the figure only.
"""

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ep_jax.metrics import drop_rates, short_number, short_time
from ep_jax.report import SUMMARY_FILE
from ep_jax.sweeps import FINISHED, Member, Sweep, replace_text, state_of

JSONL_FILE, CSV_FILE, FIGURE_FILE = "sweep.jsonl", "sweep.csv", "sweep.png"
RESULTS = (
    "loss_dropless",  # held-out cross entropy, nats per valid target
    "loss_as_trained",  # the same under the member's own capacity
    "drop_rate_sender",  # of the valid assignments of that evaluation, 0 to 1
    "drop_rate_receiver",
    "drop_rate_training",  # both stages, over all training steps
    "tokens_per_second",  # valid targets, all devices, steady state; null where too few steps were timed
    "seconds",  # of training steps, the first compilation included; after a resume, of the last part
)


@dataclasses.dataclass
class Row:
    """A member's line: what became of it, and RESULTS when it is finished."""

    member: str
    values: dict[str, Any]  # dotted key -> value
    state: str
    exit_code: int | None = None
    reason: str = ""
    results: dict[str, Any] = dataclasses.field(default_factory=dict)


def row_of(member: Member) -> Row:
    """The member's row as its folder says. Raises ConfigError as `state_of`."""
    row = Row(member.name, member.values, state_of(member), reason=member.refusal)
    if row.state == FINISHED:
        row.results = read_results(member.folder)
    return row


def read_results(folder: Path) -> dict[str, Any]:
    """RESULTS of a finished run's folder."""
    summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    trained = summary["held_out_as_trained"]
    numbers = (
        summary["held_out_dropless"]["cross_entropy"],
        trained["cross_entropy"],
        trained["drop_rate_sender"],
        trained["drop_rate_receiver"],
        drop_rates(np.asarray(summary["totals"]["drops_NPE"]))["drop_rate"],
        summary["tokens_per_second"],
        summary["seconds_of_steps"],
    )
    return dict(zip(RESULTS, numbers, strict=True))


def write_rows(sweep: Sweep, rows: Sequence[Row]) -> None:
    """Writes sweep.jsonl and sweep.csv, a line a member in the sweep's order, each file whole or not at all."""
    sweep.out.mkdir(parents=True, exist_ok=True)
    replace_text(sweep.out / JSONL_FILE, "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["member", *sweep.keys, "state", "exit_code", "reason", *RESULTS])
    for row in rows:
        values = [row.values.get(key) for key in sweep.keys]
        results = [row.results.get(name) for name in RESULTS]
        writer.writerow([row.member, *values, row.state, row.exit_code, row.reason, *results])
    replace_text(sweep.out / CSV_FILE, text.getvalue())


def results_table(sweep: Sweep, rows: Sequence[Row]) -> str:
    """A line a member: values, held-out losses, drop rates, speed, time, and what became of it with the reason."""
    columns = ["dropless", "as trained", "sender %", "receiver %", "tok/s", "time"]
    lines = [[*(key.rpartition(".")[2] for key in sweep.keys), *columns, "state"]]
    for row in rows:
        values = ["-" if row.values.get(key) is None else str(row.values[key]) for key in sweep.keys]
        state = f"{row.state}: {row.reason}" if row.reason else row.state
        lines.append([*values, *_cells(row), state])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    return "\n".join(
        "  ".join([*(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=False)), line[-1]])
        for line in lines
    )


def _cells(row: Row) -> list[str]:
    if not row.results:
        return ["-"] * 6
    free, trained, sender, receiver, _, speed, seconds = (row.results[name] for name in RESULTS)
    return [
        f"{free:.4f}",
        f"{trained:.4f}",
        f"{100 * sender:.3f}",
        f"{100 * receiver:.3f}",
        "-" if speed is None else short_number(speed),
        short_time(seconds),
    ]


def draw(sweep: Sweep, rows: Sequence[Row]) -> Any:
    """A figure of the finished members: drops by stage, throughput and loss over the last key, a line per setting of
    the other keys. Returns the matplotlib figure."""
    from matplotlib.figure import Figure

    finished = [row for row in rows if row.state == FINISHED]
    along = sweep.keys[-1] if sweep.keys else "member"
    numeric = all(type(row.values.get(along)) in (int, float) for row in finished)
    places = sorted({row.values.get(along) for row in finished}, key=(lambda place: place) if numeric else str)
    lines: dict[str, list[Row]] = {}
    for row in finished:
        others = (f"{key.rpartition('.')[2]} {row.values.get(key)}" for key in sweep.keys if key != along)
        lines.setdefault(", ".join(others), []).append(row)

    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    panels = (
        (axes[0, 0], "drop_rate_sender", 100, "dropped by senders", "% of valid assignments"),
        (axes[0, 1], "drop_rate_receiver", 100, "dropped by receivers", "% of valid assignments"),
        (axes[1, 0], "tokens_per_second", 1, "throughput", "valid targets per second"),
        (axes[1, 1], "loss_as_trained", 1, "held-out loss: as trained (line), dropless (dashed)", "nats per target"),
    )
    for number, (label, members) in enumerate(lines.items()):
        members = sorted(members, key=lambda row: places.index(row.values.get(along)))
        x = [row.values.get(along) if numeric else places.index(row.values.get(along)) for row in members]
        style = dict(color=f"C{number % 10}", marker="o", markersize=4)
        for axis, name, scale, _, _ in panels:
            y = [np.nan if row.results[name] is None else scale * row.results[name] for row in members]
            axis.plot(x, y, label=label, **style)
        axes[1, 1].plot(x, [row.results["loss_dropless"] for row in members], linestyle="--", **style)
    for axis, name, _, title, unit in panels:
        axis.set(title=title, xlabel=along, ylabel=unit)
        if name != "loss_as_trained":
            axis.set_ylim(bottom=0)
        if not numeric:
            axis.set_xticks(range(len(places)), [str(place) for place in places])
    if len(lines) > 1:
        axes[0, 0].legend(fontsize="small")
    figure.suptitle(f"Sweep {sweep.name}: {len(finished)} of {len(rows)} members finished")
    return figure
