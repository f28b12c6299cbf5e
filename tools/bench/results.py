"""Result files: what was measured, with when, by which command and on what; ready to be committed."""

import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_results(path: Path, argv: Sequence[str], results: Any, flags: Sequence[str], used_devices: int) -> None:
    """Writes JSON; `argv` is what stands behind `python -m tools.bench`, `flags` the XLA flags that were added."""
    from ep_jax.profiling import device_description

    content = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commands": [shlex.join(["python", "-m", "tools.bench", *argv])],
        "devices": device_description() | {"added_flags": list(flags), "used_devices": used_devices},
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
