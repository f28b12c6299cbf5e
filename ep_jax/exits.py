"""Exit codes of every command, and the one place where a refusal becomes a line on stderr.

Scripts and schedulers may rely on the numbers; 1 is also Python's for an unexpected error, which shows its traceback.
This file does no logging and knows nothing of JAX.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ep_jax.fields import ConfigError

DONE = 0  # finished, or a finished run was started again and had nothing to do
DIFFERS = 1  # what was compared is not equal (tools.replay --check, tools.reproduce)
REFUSED = 2  # bad configuration, command line or data: one line on stderr, nothing written
NON_FINITE = 3  # loss or a gradient became NaN or infinite; the last good state was kept, the message names the leaf
CHECKPOINT_FAILED = 4  # a checkpoint could not be written; the run stopped instead of going on unsaved
INTERRUPTED = 5  # SIGTERM: the last completed step was saved; the same command resumes there
NO_RENDEZVOUS = 6  # the other processes of the run did not come in time (distributed.py)
MEMBERS_FAILED = 7  # a sweep went through, but some of its members failed, were refused or are not finished
READER_GONE = 141  # nobody reads the output any more (`| head`); what shells make of SIGPIPE
HUNG = 8  # a step, an evaluation or a save took longer than train.hang_timeout_s; stderr names it and has all stacks


def run_main(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command's `main(argv)` and exits with the code it returns (None is DONE).

    A ConfigError becomes one line on stderr and exit code REFUSED, without a traceback. argv: sys.argv[1:] if left out.
    """
    try:
        code = main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        code = READER_GONE
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        code = REFUSED
    sys.exit(DONE if code is None else code)
