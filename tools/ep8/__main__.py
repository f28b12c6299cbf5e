"""Checks and figures of one machine with several GPUs, in one command with a time limit.

    python -m tools.ep8 --out FOLDER                     everything that fits into 9 minutes, the most telling first
    python -m tools.ep8 --out FOLDER --stages train_pooled_wave,train_rowwise     the rest, in a second call
    python -m tools.ep8 --dry-run                        the commands and the seconds that they should take on 8 H200
    python -m tools.ep8 --out FOLDER --quick             small shapes: the logic, also without GPUs

Stages: conformance of every transport against the oracle on three meshes; all-to-alls; layers, few local experts by
capacity factor, waves; a training by transport. A stage that fails or is stopped does not keep the others from running;
one that cannot get half of the time it should take is not begun. Trainings share what time there is, and one that is
stopped counts as far as it came: steps, seed and schedule are the same. After every stage FOLDER holds all results so
far: ep8_HARDWARE_DATE.json (as in benchmarks/), summary.txt, logs.tar.gz; and running.log of the stage that runs.

Exit codes: 0 all stages are done, 2 refused, 5 stopped by SIGTERM, 7 some are not done.
"""

import argparse
import json
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ep_jax import exits, xla_flags
from ep_jax.cli import CommandParser
from ep_jax.fields import ConfigError
from tools.ep8.results import Finished, figures, outcomes, rows_of, summary, write_json, write_logs
from tools.ep8.run import DONE, NOT_RUN, Outcome, last_lines, run_stage
from tools.ep8.stages import VIRTUAL_DEVICES, Machine, Stage, stages

PROBE = "import json; from ep_jax import profiling; print(json.dumps(profiling.device_description()))"
PROBE_LIMIT_S = 120
PATIENCE = 2  # times the time it should take, and a stage is stopped
SPARE_S = 5  # for the last files


def main(argv: Sequence[str]) -> int:
    """Runs the stages; returns the exit code. Raises ConfigError before the first one."""
    began = time.monotonic()
    options = parse(argv)
    if options.dry_run:
        show(chosen(options, Machine(platform="gpu", devices=8, quick=options.quick), Path("WORK")), options)
        return exits.DONE
    platform = xla_flags.default_platform()
    if platform == "cpu" and not options.quick:
        raise ConfigError("there are no GPUs here: allowed is --quick, or --dry-run")
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(exits.INTERRUPTED))  # not without ending the stage that runs
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        devices = describe_devices(platform, work)
        machine = Machine(platform=platform, devices=devices["devices"], quick=options.quick)
        todo = chosen(options, machine, work)
        print(f"{machine.devices} x {devices['device_kind']}", flush=True)
        show(todo, options)
        finished = run_all(todo, options.out, devices, deadline=began + 60 * options.minutes - SPARE_S, work=work)
    left = [one.stage.name for one in finished if one.outcome.state != DONE]
    if left:
        print(f"not done: --stages {','.join(left)}")
    return exits.MEMBERS_FAILED if left else exits.DONE


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. Raises ConfigError."""
    parser = CommandParser(
        prog="python -m tools.ep8", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=None, metavar="FOLDER", help="four files at most")
    parser.add_argument("--stages", default="", metavar="NAMES", help="of those that --dry-run shows; all if left out")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything, 9 if left out")
    parser.add_argument("--train-steps", type=int, default=200, metavar="N", help="of each training, 200 if left out")
    parser.add_argument("--quick", action="store_true", help="small shapes and few steps, for the logic")
    parser.add_argument("--dry-run", action="store_true", help="only show the commands, as for 8 GPUs")
    options = parser.parse_args(argv)
    for name, value in (("minutes", options.minutes), ("train-steps", options.train_steps)):
        if value <= 0:
            raise ConfigError(f"--{name} {value}: allowed is more than 0")
    if not (options.out or options.dry_run):
        raise ConfigError("--out FOLDER is missing")
    return options


def chosen(options: argparse.Namespace, machine: Machine, work: Path) -> list[Stage]:
    """The stages that --stages names, in their usual order. Raises ConfigError for a name that is none."""
    found = stages(machine, work, options.train_steps)
    names = [stage.name for stage in found]
    wanted = options.stages.split(",") if options.stages else names
    for name in wanted:
        if name not in names:
            raise ConfigError(f"--stages {name}: allowed are {', '.join(names)}")
    return [stage for stage in found if stage.name in wanted]


def show(todo: Sequence[Stage], options: argparse.Namespace) -> None:
    """Prints commands and estimates, and says so when the time is too short."""
    for stage in todo:
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in stage.environment.items())
        print(f"{stage.name} ({stage.expected_s} s): {variables}{shlex.join(['python', *stage.arguments])}")
    needed_s = sum(stage.expected_s for stage in todo)
    print(f"{len(todo)} stages should take {needed_s / 60:.1f} minutes; --minutes is {options.minutes:g}", flush=True)
    if needed_s > 60 * options.minutes:
        steps = f"; trainings are of {options.train_steps} steps (--train-steps)" if any(s.trains for s in todo) else ""
        print(f"that is too little: the last stages will be cut short or left out{steps}", flush=True)


def describe_devices(platform: str, work: Path) -> dict[str, Any]:
    """`device_description` of a process of its own: this one must not hold the GPUs. Raises ConfigError without it."""
    log, environment = work / "devices.log", Machine(platform=platform, devices=VIRTUAL_DEVICES).environment
    outcome = run_stage(Stage("devices", ("-c", PROBE), 15, log, environment), log, PROBE_LIMIT_S)
    if outcome.state != DONE:
        raise ConfigError(f"devices: {outcome}; {last_lines(log, 3)}")
    return json.loads(log.read_text().splitlines()[-1])


def run_all(
    todo: Sequence[Stage], out: Path, devices: dict[str, Any], *, deadline: float, work: Path
) -> list[Finished]:
    """Runs the stages in turn; after each one the files in `out` are complete."""
    finished: list[Finished] = []
    name = f"ep8_{hardware(devices)}_{time.strftime('%Y%m%d')}.json"
    for number, stage in enumerate(todo):
        left_s = deadline - time.monotonic()
        limit_s = min(left_s, PATIENCE * stage.expected_s)
        if stage.trains:
            limit_s = left_s / sum(later.trains for later in todo[number:])
        running, log = out / "running.log", work / f"{stage.name}.log"
        print(f"{stage.name} ...", flush=True)
        if limit_s < stage.least_s:
            running.touch()
            outcome = Outcome(NOT_RUN, 0, f"{max(limit_s, 0):.0f} s left, at least {stage.least_s} s needed")
        else:
            outcome = run_stage(stage, running, limit_s)
        shutil.move(running, log)
        finished.append(Finished(stage, outcome, log, rows_of(stage)))
        write_json(out / name, time.strftime("%Y-%m-%d %H:%M"), devices, finished)
        write_logs(out / "logs.tar.gz", finished)
        (out / "summary.txt").write_text(summary(finished), encoding="utf-8")
        print(figures(finished[-1]), flush=True)
    print(outcomes(finished), flush=True)
    return finished


def hardware(devices: dict[str, Any]) -> str:
    """For file names, e.g. "h200x8"."""
    kind = re.sub(r"[^a-z0-9]+", "", devices["device_kind"].lower().replace("nvidia", ""))
    return f"{kind}x{devices['devices']}"


if __name__ == "__main__":
    exits.run_main(main)
