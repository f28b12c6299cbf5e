"""Runs a stage's command in a process group of its own, with a limit, its output in a file."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from ep_jax.trackers import read_rows
from tools.ep8.stages import Stage

DONE, FAILED, STOPPED, NOT_RUN = "done", "failed", "stopped", "not run"
POLL_S = 0.5


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a stage."""

    state: str
    seconds: float
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.state}, {self.seconds:.0f} s" + (f": {self.reason}" if self.reason else "")


def run_stage(stage: Stage, log: Path, limit_s: float) -> Outcome:
    """Runs it to its end, to its last reported step, or to the limit; never raises for what the command does."""
    began = time.monotonic()
    with log.open("w") as output:
        process = _start(stage, output)
        try:
            while process.poll() is None and not _last_step_reported(stage):
                if time.monotonic() - began > limit_s:
                    return Outcome(STOPPED, time.monotonic() - began, f"its limit was {limit_s:.0f} s")
                time.sleep(POLL_S)
            reported = _last_step_reported(stage)
        finally:
            _end(process)
    seconds = time.monotonic() - began
    if process.returncode and not reported:
        return Outcome(FAILED, seconds, f"exit code {process.returncode}")
    return Outcome(DONE, seconds)


def last_lines(log: Path, count: int) -> str:
    """The end of a log, long lines cut."""
    return "\n".join(line[:200] for line in log.read_text(errors="replace").splitlines()[-count:])


def _start(stage: Stage, output: IO[str]) -> subprocess.Popen:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | stage.environment
    command = [sys.executable, *stage.arguments]
    return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def _last_step_reported(stage: Stage) -> bool:
    if not stage.trains or not stage.metrics.exists():
        return False
    rows = read_rows(stage.metrics)
    return bool(rows) and rows[-1]["step"] >= stage.steps


def _end(process: subprocess.Popen) -> None:
    """Ends what is left of the process group at once: after SIGTERM a training would first save its state."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
