"""Runs a sweep: `python -m ep_jax.train` once a member, each in a folder of its own.

    python -m tools.sweep configs/sweeps/capacity.toml --dry-run    # members and commands
    python -m tools.sweep configs/sweeps/capacity.toml              # run; the same command goes on where it stopped

What a file holds is described in ep_jax/sweeps.py. Finished members are skipped, half-done ones resume from their
checkpoint; results are written as each member ends: sweep.jsonl, sweep.csv, and at the end a table and sweep.png.

Exit codes: 0 all members finished; 2 the file was refused, nothing was run; 5 stopped by Ctrl-C or SIGTERM, the same
command goes on; 7 some members failed, were refused or are not finished, the others are.
"""

import argparse
import contextlib
import fcntl
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from ep_jax import exits
from ep_jax.cli import CommandParser
from ep_jax.fields import ConfigError
from ep_jax.report import SUMMARY_FILE
from ep_jax.sweeps import FINISHED, HALF_DONE, NEW, REFUSED, Member, Sweep, read_sweep, write_member
from tools import sweep_jobs
from tools.sweep_results import FIGURE_FILE, Row, draw, read_results, results_table, row_of, write_rows

FAILED, STOPPED = "failed", "stopped"  # states beside those of ep_jax.sweeps: how a run ended
COMMAND = (sys.executable, "-m", "ep_jax.train")
OUTPUT_FILE = "output.txt"  # in a member's folder: what its runs printed, the newest last
POLL_S = 0.05


def main(argv: Sequence[str]) -> int:
    """Does what the command line says; returns the exit code. Raises ConfigError before anything is run."""
    options = _parser().parse_args(argv)
    if options.jobs is not None and options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs}: allowed is at least 1")
    sweep = read_sweep(options.sweep)
    rows = [row_of(member) for member in sweep.members]
    if options.dry_run:
        return show_plan(sweep, rows)
    if options.write:
        kind, file = options.write
        return write_jobs(sweep, rows, kind, Path(file), options)
    if options.collect:
        return show_results(sweep, rows)
    with StopRequest() as request, locked(sweep.out) as lock:
        run_members(sweep, rows, jobs=options.jobs or 1, request=request, lock=lock)
        code = show_results(sweep, rows)
    unfinished = any(row.state in (NEW, HALF_DONE, STOPPED) for row in rows)
    return exits.INTERRUPTED if request.count and unfinished else code


class StopRequest:
    """Counts Ctrl-C, SIGTERM and SIGHUP while its block is entered: 1 = end members in order, more = kill them."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.count += 1


@contextlib.contextmanager
def locked(folder: Path) -> Generator[int]:
    """Holds the sweep's folder for this process and the members it starts, which inherit the lock and so keep it when
    this process is killed. Raises ConfigError when it is held."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "sweep.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another sweep, or a member that it left, is still running there") from None
        yield file.fileno()


def run_members(
    sweep: Sweep,
    rows: Sequence[Row],
    *,
    jobs: int,
    request: StopRequest,
    lock: int,
    command: Sequence[str] = COMMAND,
) -> None:
    """Runs the members that are not finished, `jobs` at once, and keeps `rows` and the result files up to date.

    After a stop request no member is started, and those that run are asked to save and end.
    """
    waiting = [place for place, row in enumerate(rows) if row.state in (NEW, HALF_DONE)]
    running: dict[int, subprocess.Popen] = {}
    told = 0
    write_rows(sweep, rows)
    try:
        while running or (waiting and not request.count):
            while waiting and len(running) < jobs and not request.count:
                place = waiting.pop(0)
                _say(place, rows, "resumed" if rows[place].state == HALF_DONE else "started")
                running[place] = start(sweep.members[place], command, lock)
            if request.count > told:
                told = request.count
                _end(running.values(), kill=told > 1)
                print("stopping: members save their last step and end; again to kill them", flush=True)
            for place in [place for place, process in running.items() if process.poll() is not None]:
                ended(sweep.members[place], rows[place], running.pop(place).returncode, stopping=bool(request.count))
                write_rows(sweep, rows)
                _say(place, rows, rows[place].state, rows[place].reason)
            time.sleep(POLL_S)
    finally:
        _end(running.values(), kill=False)
        for process in running.values():
            process.wait()


def start(member: Member, command: Sequence[str], lock: int) -> subprocess.Popen:
    """Starts a member in a session of its own: Ctrl-C in a terminal then reaches this process only, which tells it."""
    write_member(member)
    with open(member.folder / OUTPUT_FILE, "a") as output:
        return subprocess.Popen(
            member_command(member, command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
        )


def member_command(member: Member, command: Sequence[str] = COMMAND) -> list[str]:
    return [*command, f"--config={member.file}"]


def ended(member: Member, row: Row, code: int, *, stopping: bool) -> None:
    """Notes in the member's row how its run ended. code: as in exits.py, or minus the signal that ended it."""
    row.exit_code = code
    if code == exits.DONE and (member.folder / SUMMARY_FILE).exists():
        row.state, row.reason, row.results = FINISHED, "", read_results(member.folder)
    elif code == exits.INTERRUPTED or (stopping and code < 0):
        row.state, row.reason = STOPPED, "the same command goes on"
    elif code == exits.DONE:
        row.state = FAILED
        row.reason = f"ended without {SUMMARY_FILE}, killed while it was evaluated? Remove {member.folder} to repeat it"
    else:
        what = f"signal {-code}" if code < 0 else f"exit code {code}"
        row.state, row.reason = FAILED, f"{what}: {last_line(member.folder / OUTPUT_FILE)}"


def last_line(file: Path) -> str:
    """The last line with text, where runs say why they ended."""
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def show_plan(sweep: Sweep, rows: Sequence[Row]) -> int:
    """Prints what would be run, and writes nothing."""
    print(results_table(sweep, rows), "", sep="\n")
    for member, row in zip(sweep.members, rows, strict=True):
        if row.state in (NEW, HALF_DONE):
            print(shlex.join(member_command(member)))
    print(f"{sum(row.state in (NEW, HALF_DONE) for row in rows)} of {len(rows)} members to run, in {sweep.out}")
    return exits.MEMBERS_FAILED if any(row.state == REFUSED for row in rows) else exits.DONE


def write_jobs(sweep: Sweep, rows: Sequence[Row], kind: str, file: Path, options: argparse.Namespace) -> int:
    """Writes the members' configurations and a scheduler's file for those that are not finished."""
    make = {"slurm": sweep_jobs.slurm, "jobset": sweep_jobs.jobset}.get(kind)
    if make is None:
        raise ConfigError(f"--write {kind}: allowed is slurm or jobset, then the file to write")
    if file.exists():
        raise ConfigError(f"--write {kind} {file}: exists already and is not overwritten")
    todo = [member for member, row in zip(sweep.members, rows, strict=True) if row.state in (NEW, HALF_DONE)]
    refused = [row for row in rows if row.state == REFUSED]
    for row in refused:
        print(f"refused: {row.member}: {row.reason}")
    if not todo:
        print(f"nothing to run: {file} was not written")
        return exits.MEMBERS_FAILED if refused else exits.DONE
    for member in todo:
        write_member(member)
    file.write_text(make(sweep.name, options.sweep, todo, options.jobs), encoding="utf-8")
    print(f"{file}: {len(todo)} of {len(rows)} members; their configurations are in {sweep.out}")
    return exits.MEMBERS_FAILED if refused else exits.DONE


def show_results(sweep: Sweep, rows: Sequence[Row]) -> int:
    """Writes and prints the results; returns DONE when every member is finished, exits.MEMBERS_FAILED otherwise."""
    write_rows(sweep, rows)
    print("", results_table(sweep, rows), "", sep="\n")
    finished = sum(row.state == FINISHED for row in rows)
    if finished:
        try:
            draw(sweep, rows).savefig(sweep.out / FIGURE_FILE, dpi=120)
        except ImportError:
            print(f"{FIGURE_FILE} was not drawn: it needs the package matplotlib")
    print(f"{finished} of {len(rows)} members finished; results are in {sweep.out}", flush=True)
    return exits.DONE if finished == len(rows) else exits.MEMBERS_FAILED


def _end(processes: Iterable[subprocess.Popen], *, kill: bool) -> None:
    for process in processes:
        process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)


def _say(place: int, rows: Sequence[Row], what: str, why: str = "") -> None:
    print(f"[{place + 1}/{len(rows)}] {rows[place].member}: {what}{f': {why}' if why else ''}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m tools.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", metavar="SWEEP.toml", help="the sweep's file")
    parser.add_argument("--jobs", type=int, metavar="N", help="members at once (1); on GPUs, and to compare speeds, 1")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="show members and commands, write nothing")
    instead.add_argument("--collect", action="store_true", help="results of what is finished, run nothing")
    instead.add_argument(
        "--write", nargs=2, metavar=("slurm|jobset", "FILE"), help="write a scheduler's file, run nothing"
    )
    return parser


if __name__ == "__main__":
    exits.run_main(main)
