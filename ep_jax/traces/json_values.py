"""JSON values of imported traces, checked and as NumPy arrays; a refusal names the place and what is allowed."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ep_jax.traces.file import TraceError

HIGHEST = 2**31 - 1
# What is in a list -> NumPy's kinds of it, what it becomes.
JSON_KINDS: dict[str, tuple[str, Any]] = {
    "integers": ("i", np.int64),
    "finite float32 numbers": ("if", np.float32),
    "true/false or 1/0": ("bi", bool),
}


def text_of(path: Path) -> bytes:
    """A file's content. Raises TraceError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None


def object_of(where: str, text: bytes) -> dict[str, Any]:
    """A JSON object. Raises TraceError for anything else, as the functions below do."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TraceError(f"{where}: allowed is a JSON object; {error}") from None
    if not isinstance(value, dict):
        raise TraceError(f"{where}: found a {type(value).__name__}; allowed is a JSON object")
    return value


def integer_of(where: str, name: str, value: Any, lowest: int = 0) -> int:
    """An integer from `lowest` to HIGHEST."""
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= HIGHEST:
        found = "is missing" if value is None else f"= {value!r}"
        raise TraceError(f"{where}: {name} {found}; allowed is an integer from {lowest} to {HIGHEST}")
    return value


def is_nested(value: Any, depth: int) -> bool:
    """Whether the first of a list's elements, of this one's elements and so on are lists, `depth` deep."""
    return depth == 0 or (isinstance(value, list) and bool(value) and is_nested(value[0], depth - 1))


def numbers_of(where: str, name: str, value: Any, kind: str, axes: int) -> np.ndarray:
    """A list, or lists of equally long lists, of a kind of JSON_KINDS as an array of `axes` axes."""
    wanted = (
        f"allowed {'are ' + 'lists of ' * (axes - 1) + 'equally long lists' if axes > 1 else 'is a list'} of {kind}"
    )
    if value is None:
        raise TraceError(f"{where}: {name} is missing; {wanted}")
    try:
        array = np.array(value)
    except ValueError:
        raise TraceError(f"{where}: {name}: found lists of different lengths; {wanted}") from None
    allowed, dtype = JSON_KINDS[kind]
    if array.ndim != axes or not array.size or array.dtype.kind not in allowed:
        raise TraceError(f"{where}: {name}: found {list(array.shape)} of {array.dtype}; {wanted}")
    with np.errstate(over="ignore"):
        found, array = array, array.astype(dtype)
    if not np.isfinite(array).all() or (dtype is bool and (found != array).any()):
        raise TraceError(f"{where}: {name}: found another number; {wanted}")
    return array
