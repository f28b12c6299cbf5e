"""Gathers finished runs into one small file that notebooks start from.

    python experiments/collect.py runs/ladder/* --out experiments/results/ladder.json

Per run: the settings in which the runs differ, parameters and FLOPs, the summary of held-out losses, and curves of at
most --points logged steps. Rates of curves are those of single steps, as logged.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ep_jax import config as configuration
from ep_jax import flops
from ep_jax.trackers import read_rows

CURVES = (
    "step",
    "tokens",
    "cross_entropy",
    "drop_rate_sender",
    "drop_rate_receiver",
    "lost_weight_sender",
    "lost_weight_receiver",
    "load_balance",
    "drop_worst_expert",
    "drop_fairness_column",
    "step_ms",
)


def gather(folder: Path, points: int) -> dict[str, Any]:
    """What is kept of one run folder."""
    config = configuration.load(str(folder / "config.toml"))
    summary = json.loads((folder / "summary.json").read_text())
    summary.pop("totals")
    rows = read_rows(folder / "metrics.jsonl")
    count = min(points, len(rows))
    kept = [rows[round(i * (len(rows) - 1) / max(count - 1, 1))] for i in range(count)]
    total, active = flops.num_parameters(config.model, config.router)
    devices = json.loads((folder / "devices.json").read_text())
    return {
        "name": folder.name,
        "parameters": total,
        "active_parameters": active,
        "training_flops_per_token": flops.flops_per_token(
            config.model, config.router, config.data.sequence_length
        ).training,
        "tokens": rows[-1]["tokens"],
        "summary": summary,
        "curves": {name: [_short(row.get(name)) for row in kept] for name in CURVES},
        "device": f"{devices['devices']} x {devices['device_kind']}",
        "versions": devices["versions"],
    }


def differences(folders: list[Path]) -> list[dict[str, Any]]:
    """Of each run, the settings that are not the same in all of them; run_dir left out."""
    texts = [configuration.load(str(folder / "config.toml")) for folder in folders]
    values = []
    for config in texts:
        settings = {}
        for key in configuration.keys().values():
            settings[key.name] = getattr(getattr(config, key.section) if key.section else config, key.leaf)
        values.append(settings)
    changing = [name for name in values[0] if len({repr(v[name]) for v in values}) > 1 and name != "run_dir"]
    return [{name: v[name] for name in changing} for v in values]


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="+", type=Path, help="run folders; those without a summary are named and left out"
    )
    parser.add_argument("--points", type=int, default=80)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    finished = sorted(folder for folder in arguments.runs if (folder / "summary.json").is_file())
    for folder in sorted(set(arguments.runs) - set(finished)):
        print(f"left out, not finished: {folder}")
    runs = [
        {"settings": settings, **gather(folder, arguments.points)}
        for folder, settings in zip(finished, differences(finished), strict=True)
    ]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(run) for run in runs)
    arguments.out.write_text('{"runs": [\n' + lines + "\n]}\n")
    print(f"{len(runs)} runs in {arguments.out}")


if __name__ == "__main__":
    main()
