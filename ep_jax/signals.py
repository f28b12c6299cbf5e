"""Requests to stop: SIGTERM becomes a flag that the training loop reads between steps.

What to do about a request (save, exit code) is the training loop's affair. With one process nothing here imports JAX.
"""

import signal
from typing import Any

from ep_jax.agreement import AnyProcess


class TerminationRequest:
    """Turns SIGTERM into a flag that the training loop reads between steps.

    Inside `with TerminationRequest() as termination:` the default action applies until `termination.arm()` is called,
    once there is something worth saving; leaving the block puts the earlier handler back. Handlers run in the main
    thread, so the block must be entered there. A second SIGTERM only sets the flag again: a save is not disturbed.
    """

    def __init__(self) -> None:
        self.requested = False
        self._anywhere = AnyProcess()
        self._previous: Any = signal.SIG_DFL

    def __enter__(self) -> "TerminationRequest":
        self._previous = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        if self._previous == signal.SIG_DFL:
            # jax.distributed.initialize has its own handler, unknown to Python, that would swallow the signal.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def arm(self) -> None:
        """From now on SIGTERM is a request. System calls in progress, also those of libraries, are continued."""
        signal.signal(signal.SIGTERM, self._note)
        signal.siginterrupt(signal.SIGTERM, False)

    def requested_anywhere(self) -> bool:
        """Whether any process was asked to stop: the same answer everywhere. Every process calls it once a step."""
        return self._anywhere(self.requested)

    def _note(self, number: int, frame: object) -> None:
        self.requested = True
