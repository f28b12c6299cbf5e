"""Refuses files above 500 kB: large ones do not belong into the repository. Works outside a git checkout too."""

import os
import subprocess
import sys
from pathlib import Path

LIMIT_BYTES = 500_000
NOT_OURS = {"build", "dist", "runs", "__pycache__"}


def project_files() -> list[Path]:
    """What git tracks or would track; outside a git checkout every file that is not hidden or generated."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        return list(walk(Path()))
    return [Path(name) for name in listed.split("\0") if name and Path(name).is_file()]


def walk(folder: Path):
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in NOT_OURS]
        yield from (Path(path) / name for name in files)


def main() -> int:
    large = [(path.stat().st_size, path) for path in project_files() if path.stat().st_size > LIMIT_BYTES]
    for size_bytes, path in large:
        print(f"{path}: {size_bytes} bytes, allowed are {LIMIT_BYTES}")
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main())
