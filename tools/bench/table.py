"""The table of layer results, from result files: printed, or written into the README between two comments.

    python -m tools.bench table benchmarks/layer_*.json          prints it
    python -m tools.bench table --readme README.md               writes it from the files that the comment names

In the README stand `<!-- bench table: PATTERNS -->` and `<!-- bench table end -->`; patterns are of files, relative to
the README's folder. One row for every shape, routing, variant and device; the newest result counts, of results equally
old the last one. Results without a forward and backward time (products, exchanges, trainings) are left out.
"""

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ep_jax import exits
from ep_jax.cli import CommandParser
from ep_jax.fields import ConfigError

BLOCK = re.compile(r"(<!-- bench table: (?P<patterns>[^\n]+?) -->\n).*?(<!-- bench table end -->)", re.DOTALL)
COLUMNS = (
    *("shape", "routing", "variant", "devices", "forward ms", "forward+backward ms (10-90 %)", "limit ms (ratio)"),
    *("after pauses ms", "TFLOP/s", "GB/s off device", "drops %", "peak GiB", "x stock"),
)


def main(argv: Sequence[str]) -> int:
    """Prints or writes the table; returns the exit code."""
    parser = CommandParser(
        prog="python -m tools.bench table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="result files, JSON")
    parser.add_argument("--readme", type=Path, default=None, help="write the table into this file")
    arguments = parser.parse_args(argv)
    if bool(arguments.files) == bool(arguments.readme):
        raise ConfigError("table: expected result files, or --readme FILE, whose comment names them")
    if arguments.files:
        print(table(arguments.files))
    else:
        arguments.readme.write_text(with_table(arguments.readme), encoding="utf-8")
    return exits.DONE


def with_table(readme: Path) -> str:
    """The README's text with the table made anew. Raises ConfigError without comments, or when no file is named."""
    text = readme.read_text(encoding="utf-8")
    found = BLOCK.search(text)
    if not found:
        raise ConfigError(f"{readme}: expected <!-- bench table: PATTERNS --> and <!-- bench table end -->")
    files = sorted({file for pattern in found["patterns"].split() for file in readme.parent.glob(pattern)})
    if not files:
        raise ConfigError(f"{readme}: no file matches {found['patterns']}")
    return f"{text[: found.start()]}{found[1]}\n{table(files)}\n\n{found[3]}{text[found.end() :]}"


def table(files: Iterable[Path]) -> str:
    """Markdown of the newest layer results in these files."""
    newest: dict[tuple[str, ...], tuple[str, dict[str, Any]]] = {}
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: expected a result file, JSON ({error})") from error
        for row in content.get("results", []):
            if "forward_backward" in row and "limit_ms" in row:
                key = (row["shape"], row["routing"], row["variant"], devices(content["devices"]))
                if key not in newest or content["date"] >= newest[key][0]:
                    newest[key] = content["date"], row
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    lines += [cells(key, row) for key, (_, row) in sorted(newest.items(), key=_order)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def devices(description: dict[str, Any]) -> str:
    """For example "2 x NVIDIA H200"."""
    return f"{description.get('used_devices', description['devices'])} x {description['device_kind']}"


def cells(key: Sequence[str], row: dict[str, Any]) -> list[str]:
    """One line of the table; "-" for what an older result does not say."""
    forward, both, limit = row["forward"], row["forward_backward"], row["limit_ms"]["both"]
    achieved, paused = row.get("achieved", {}).get("both"), row.get("forward_backward_after_pauses")
    return [
        *key,
        f"{forward['median_ms']:.2f}",
        f"{both['median_ms']:.2f} ({both['p10_ms']:.2f}-{both['p90_ms']:.2f})",
        f"{limit:.1f} ({both['median_ms'] / limit:.2f})",
        f"{paused['median_ms']:.2f}" if paused else "-",
        f"{achieved['tflops']:.0f}" if achieved else "-",
        f"{achieved['off_device_gb_per_s']:.0f}" if achieved else "-",
        f"{100 * row['drop_rate']:.3g}",
        f"{row['peak_gib']:.1f}" if "peak_gib" in row else "-",
        f"{row['stock_ratio']:.1f}" if "stock_ratio" in row else "-",
    ]


def _order(item: tuple[tuple[str, ...], tuple[str, dict[str, Any]]]) -> tuple:
    """By shape, routing and devices, the fastest variant first."""
    (shape, routing, _, where), (_, row) = item
    return shape, routing, where, row["forward_backward"]["median_ms"]
