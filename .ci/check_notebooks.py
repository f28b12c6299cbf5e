"""Refuses notebooks under experiments/ whose text pair (same name, .py, percent format) is missing or differs."""

import sys
from pathlib import Path

import jupytext
from jupytext.compare import NotebookDifference, compare_notebooks


def complaint(notebook: Path) -> str:
    """What is wrong with one notebook, in one line; empty when nothing is."""
    pair = notebook.with_suffix(".py")
    if not pair.is_file():
        return f"{notebook}: has no text pair {pair.name}; run `jupytext --set-formats ipynb,py:percent` on it"
    try:
        compare_notebooks(jupytext.read(notebook), jupytext.read(pair), fmt="py:percent")
    except NotebookDifference:
        return f"{notebook}: differs from {pair.name}; run `make notebooks`, or `jupytext --sync` on the newer one"
    return ""


def main() -> int:
    notebooks = [path for path in Path("experiments").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts]
    complaints = [line for line in map(complaint, sorted(notebooks)) if line]
    print(*complaints, sep="\n", end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
