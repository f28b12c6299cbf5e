"""Ends a process that stands still: a collective that some device never joins waits forever, and says nothing.

The training loop names each phase as it enters it. When the next name does not come in time, a thread prints the phase
and the stacks of all threads to stderr and ends the process with its own exit code, so that a scheduler can start the
run again from its last checkpoint (tools/launch). Nothing is saved: the state is on devices that do not answer. Every
process of a run has its own watchdog.

Time is counted in short waits of that thread, so a process that was suspended is not taken for one that hangs. The
thread needs Python's lock (GIL): JAX gives it up wherever it waits for devices, foreign code may not.
"""

import dataclasses
import faulthandler
import os
import sys
import threading

STDERR = 2


@dataclasses.dataclass
class _Phase:
    name: str
    limited: bool
    waited_s: float = 0.0  # written by the thread alone


class Watchdog:
    """Inside `with Watchdog(timeout_s, exit_code) as watchdog:` every phase but unlimited ones must end in time.

    timeout_s: seconds that a phase may last; 0 watches nothing. Until the first `enter` nothing is limited.
    """

    def __init__(self, timeout_s: float, exit_code: int):
        self.timeout_s, self.exit_code = timeout_s, exit_code
        self._wait_s = min(1.0, timeout_s / 4)
        self._current = _Phase("start", limited=False)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.timeout_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def enter(self, phase: str, *, limited: bool = True) -> None:
        """A phase begins, and the one before is over. Compilation takes as long as it takes: limited=False."""
        self._current = _Phase(phase, limited)

    def _watch(self) -> None:
        while not self._closed.wait(self._wait_s):
            current = self._current
            current.waited_s += self._wait_s
            if current.limited and current.waited_s > self.timeout_s:
                self._end(current.name)

    def _end(self, phase: str) -> None:
        message = f"hang: {phase} has not ended within {self.timeout_s:g} s; stacks of all threads follow"
        print(message, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(STDERR)
        os._exit(self.exit_code)
