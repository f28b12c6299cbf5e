"""Stands in for `python -m ep_jax.train` in test_sweep.py: no training, a behaviour per ep.sender_factor.

1.5 fails, 2.0 and 2.5 wait for SIGTERM like a run that saves and exits with code 5, 2.75 does not heed it, 3.0 ends
without a summary, and everything else finishes. Each start is a line in starts.txt of the member's folder.
"""

import json
import signal
import sys
import time
import tomllib
from pathlib import Path

DONE, NON_FINITE, INTERRUPTED = 0, 3, 5  # as in ep_jax/exits.py, which would take a second to import
LIMIT_S = 60


def main() -> int:
    [option] = sys.argv[1:]
    config = tomllib.loads(Path(option.removeprefix("--config=")).read_text())
    folder, factor = Path(config["run_dir"]), config["ep"]["sender_factor"]
    with open(folder / "starts.txt", "a") as file:
        file.write(f"{config['run_dir']}\n")
    if factor == 1.5:
        print("step 1/5\nstopped: step 2: gradient of head not finite\n")
        return NON_FINITE
    if factor == 3.0:
        return DONE
    if factor >= 2.0 and not (folder / "checkpoints" / "3").exists():
        return wait(folder, heed=factor != 2.75)
    finish(folder, factor)
    return DONE


def wait(folder: Path, *, heed: bool) -> int:
    signal.signal(signal.SIGTERM, lambda *_: (folder / "asked").touch())
    (folder / "waiting").touch()
    deadline = time.monotonic() + LIMIT_S  # nothing is left behind by a test that fails
    while time.monotonic() < deadline and not (heed and (folder / "asked").exists()):
        time.sleep(0.02)
    (folder / "checkpoints" / "3").mkdir(parents=True)
    return INTERRUPTED


def finish(folder: Path, factor: float) -> None:
    rates = {"drop_rate": 0.03, "drop_rate_sender": 0.02, "drop_rate_receiver": 0.01}
    summary = {
        "held_out_dropless": {"cross_entropy": 2.0},
        "held_out_as_trained": {"cross_entropy": 2.0 + 1 / factor, **rates},
        "totals": {"drops_NPE": [[[50, 50], [3, 2], [1, 0]]]},
        "tokens_per_second": 1000 * factor,
        "seconds_of_steps": 3.0,
    }
    (folder / "summary.json").write_text(json.dumps(summary))


sys.exit(main())
