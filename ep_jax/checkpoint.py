"""Checkpoints: the training state written in the background by Orbax, whole or not there, and restored on any mesh.

A checkpoint is a folder named after its step: Orbax's files, and MANIFEST.json with the size and CRC-32 of each. It is
written as `unfinished-save-STEP` and renamed last, so a folder without a valid manifest is damage, not a checkpoint.
Leaves are stored by path ("params/embed/w"), never by Python class, and restored by global index into the shardings of
the target: device count, mesh and transport may differ. At most one save is in flight.

With several processes all of them make the same calls in the same order, on a shared POSIX file system. What is in the
state, when to save and which exit code follows is the training loop's affair.
"""

import contextlib
import dataclasses
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ep_jax.agreement import AnyProcess, barrier, first_process, from_first, processes
from ep_jax.fields import ConfigError, check, setting
from ep_jax.integrity import MANIFEST, checksums, find_damage, read_manifest, write_manifest

CHECKPOINTS = "checkpoints"  # the subfolder of a run folder
UNFINISHED = "unfinished-"  # what a killed save or removal leaves behind starts with this
PEER_TIMEOUT_S = 1200  # how long a process waits for the others to finish their part of a save

_save_numbers = itertools.count()  # every process saves in the same order, so the numbers agree


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and how many to keep."""

    SECTION: ClassVar[str] = "checkpoint"

    every: int = setting(0, at_least=0, unit="steps", doc="save after every so many steps; 0 = only at the end")
    keep: int = setting(2, at_least=1, doc="newest checkpoints kept; older ones go once a newer one is verified")
    asynchronous: bool = setting(True, doc="write in the background while training goes on")

    def __post_init__(self):
        check(self)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged. One line that names the path."""


class Point(NamedTuple):
    """A checkpoint whose files have been verified: where it is and of which step."""

    folder: Path
    step: int

    @property
    def path(self) -> Path:
        return self.folder / str(self.step)


class Checkpointer:
    """Saves the state of one run into `folder`, and restores it.

    A save that fails in the background raises CheckpointError at the next `save`, `check`, `wait` or `close`, once, on
    every process. Older checkpoints are untouched by it. Close it also after an error (`contextlib.closing`): Python
    starts no more threads once it is exiting, so a save still in flight then would be left unfinished.
    """

    def __init__(self, folder: str | Path, config: CheckpointConfig) -> None:
        self.folder = Path(folder).absolute()
        self.config = config
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None
        self._step: int | None = None  # of the save in flight or the last one that succeeded
        self._failed_anywhere = AnyProcess()

    def save(self, step: int, state: Any, metadata: dict[str, Any]) -> None:
        """Starts a save; returns once the state is in host memory, so that the caller may donate it right away.

        state: any pytree of global jax.Arrays. metadata: JSON. An earlier save still in flight is waited for; a step
        that this object has saved already is not saved again; another checkpoint of the same step is replaced.
        Raises CheckpointError.
        """
        self.wait()
        if step == self._step:
            return
        self._step = step
        target = self.folder / f"{UNFINISHED}save-{step}"
        metadata = json.loads(json.dumps(metadata))  # a copy, and a TypeError now rather than in the background
        self._all_or_none(_error_of(self._prepare) if processes()[0] == 0 else None)
        try:
            written = _orbax().save_async(target, leaves_by_path(state), custom_metadata=metadata)
        except Exception as error:
            self._step = None
            raise CheckpointError(_one_line(self.folder / str(step), step, error)) from error
        name = f"checkpoint {next(_save_numbers)}"
        self._saving = self._writer.submit(self._finish, step, target, written, name)
        if not self.config.asynchronous:
            self.wait()

    def restore(self, target: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """(state, metadata) of a step, or of the newest whole checkpoint. target and errors: see `restore` below.

        A damaged newest checkpoint is passed over with a warning; a damaged `step` raises CheckpointError.
        """
        self.wait()
        point = newest_whole(self.folder) if step is None else whole(self.folder, step)
        if point is None:
            raise CheckpointError(f"{self.folder}: there is no checkpoint")
        return restore(point, target)

    def check(self) -> None:
        """Raises CheckpointError if the save in flight has failed; never waits for it. Cheap enough for every step.

        With several processes the failure shows one call later, on all of them at once.
        """
        error = self._saving.exception() if self._saving is not None and self._saving.done() else None
        if self._failed_anywhere(error is not None):
            self._raise(error)

    def wait(self) -> None:
        """Returns when the save in flight, if any, is whole on disk. Raises CheckpointError if it failed."""
        if self._saving is not None:
            self._all_or_none(self._saving.exception())
            self._saving = None

    def close(self) -> None:
        """Waits, then ends the background thread. Calling it again does nothing. Raises CheckpointError like `wait`."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{UNFINISHED}*"):
            _delete(leftover)
        later = [step for step in steps_found(self.folder) if self._step is not None and step > self._step]
        if later:
            _warn(f"{self.folder} holds later checkpoints {later}: --resume auto will take the newest of them")

    def _finish(self, step: int, target: Path, written: Any, name: str) -> None:
        """In the background: waits for Orbax, writes the manifest, renames, verifies; only then removes old ones."""
        written.result()
        index, count = processes()
        try:
            try:
                write_manifest(target, checksums(target, (index, count)), _part(index))
            finally:
                barrier(f"{name}: parts", PEER_TIMEOUT_S)
            if index == 0:
                _commit(target, self.folder / str(step), count)
                _remove_old(self.folder, step, self.config.keep)
        finally:
            barrier(f"{name}: done", PEER_TIMEOUT_S)

    def _all_or_none(self, error: BaseException | None) -> None:
        if first_process(error is not None) is not None:
            self._raise(error)

    def _raise(self, error: BaseException | None) -> None:
        step, self._step, self._saving = self._step, None, None
        raise CheckpointError(_one_line(self.folder / str(step), step, error)) from error


def restore(point: Point, target: Any, *, partial: bool = False) -> tuple[Any, dict[str, Any]]:
    """(state, metadata) of a verified checkpoint.

    target: pytree of jax.ShapeDtypeStruct with the structure of the saved state and a sharding on every leaf. Each
    device reads only its own part. partial: the target may leave out leaves, which are then not read. Raises
    ConfigError when a leaf is missing, new (unless partial), or has another shape or dtype.
    """
    import jax

    v1, wanted = _orbax(), leaves_by_path(target)
    saved = v1.metadata(point.path)
    there = {path: leaf for path, leaf in saved.metadata.items() if path in wanted or not partial}
    _refuse_mismatch(point, there, wanted)
    context = v1.Context()
    context.pytree.loading.partial_load = partial
    with context:
        loaded = v1.load(point.path, wanted)
    return jax.tree.unflatten(jax.tree.structure(target), [loaded[path] for path in wanted]), saved.custom_metadata


def read_metadata(point: Point) -> dict[str, Any]:
    """The JSON saved beside the state."""
    return _orbax().metadata(point.path).custom_metadata


def resume_point(folder: str | Path, resume: str) -> Point | None:
    """The checkpoint to go on from, verified, or None to start anew.

    folder: the run's own checkpoints folder. resume: "never", "auto" (newest whole one in `folder`) or PATH of a run
    folder, its checkpoints folder (newest whole one there) or one step folder (that one, without fall-back).
    Raises ConfigError when PATH is none of these, CheckpointError when what is there is damaged.
    """
    if resume == "never":
        return None
    if resume == "auto":
        return newest_whole(folder)
    path = Path(resume).absolute()
    allowed = "allowed is auto, never, or PATH of a run folder, its checkpoints folder or one step folder"
    if not path.exists():
        near = ", ".join(map(str, steps_found(path.parent))) or "no checkpoints"
        raise ConfigError(f"resume = {resume!r}: no such path ({path.parent} holds {near}); {allowed}")
    inside = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    if steps_found(inside):
        return newest_whole(inside)
    if path.name.isdigit():
        return whole(path.parent, int(path.name))
    raise ConfigError(f"resume = {resume!r}: there is no checkpoint in it; {allowed}")


def newest_whole(folder: str | Path) -> Point | None:
    """The newest checkpoint whose files all have their size and CRC-32, the same on every process; None if never saved.

    Anything newer that is damaged or unfinished is named in one warning line each. Raises CheckpointError when there
    are checkpoints and none is whole.
    """
    folder = Path(folder).absolute()
    if processes()[0] == 0:
        for leftover in sorted(folder.glob(f"{UNFINISHED}save-*")):
            _warn(f"{leftover}: expected a checkpoint, found a save that never finished; ignored")
    steps = from_first(steps_found(folder))[::-1]
    found = []
    for step, older in itertools.zip_longest(steps, steps[1:]):
        damaged, damage = _damage_anywhere(folder / str(step))
        if not damaged:
            return Point(folder, step)
        if damage:
            next_one = "it is the oldest" if older is None else f"falling back to step {older}"
            _warn(f"checkpoint {folder / str(step)} is damaged: {damage}; {next_one}")
        if (folder / str(step)).is_file():
            continue  # in the way, but not a checkpoint that was lost: no reason to refuse a fresh start
        found.append(f"{step} ({damage or 'damaged, see the warning of another process'})")
    if found:
        raise CheckpointError(f"{folder}: no whole checkpoint among {', '.join(found)}")
    return None


def whole(folder: str | Path, step: int) -> Point:
    """The checkpoint of one step, verified. Raises CheckpointError when it is damaged or not there."""
    point = Point(Path(folder).absolute(), step)
    damaged, damage = _damage_anywhere(point.path)
    if damaged:
        raise CheckpointError(f"checkpoint {point.path} is damaged: {damage or 'see the message of another process'}")
    return point


def steps_found(folder: Path) -> list[int]:
    """The steps that have an entry in a checkpoints folder, ascending, whole or not."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name))


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Leaves of a pytree by path, such as "opt_state/0/mu/embed", in the order of jax.tree.leaves."""
    import jax

    named = jax.tree.leaves_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in named}
    if len(leaves) != len(named):
        raise ValueError("two leaves of the state have the same path: a key holds a '/'")
    return leaves


def _refuse_mismatch(point: Point, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    differing = []
    for path in dict.fromkeys([*wanted, *saved]):
        there, here = _kind(saved.get(path)), _kind(wanted.get(path))
        if there != here:
            differing.append(f"{path} is {there} there and {here} here")
    if differing:
        more = f" (and {len(differing) - 1} more leaves)" if len(differing) > 1 else ""
        raise ConfigError(f"checkpoint {point.path} does not fit this model: {differing[0]}{more}")


def _kind(leaf: Any) -> str:
    return "absent" if leaf is None else f"{leaf.dtype.name}{list(leaf.shape)}"


def _commit(target: Path, final: Path, share_count: int) -> None:
    """Merges the parts of the manifest, gives the folder its final name, and verifies it there."""
    files = {}
    for index in range(share_count):
        files.update(read_manifest(target, _part(index)))
    write_manifest(target, files)
    for index in range(share_count):
        (target / _part(index)).unlink()
    if final.is_dir():
        with _removal(final):
            target.rename(final)
    else:
        target.rename(final)
    if damage := find_damage(final):
        raise OSError(f"damaged right after it was written: {damage}")


def _remove_old(folder: Path, newest: int, keep: int) -> None:
    """Removes what is older than the `keep` newest whole checkpoints up to step `newest`, damaged ones included."""
    steps = [step for step in steps_found(folder) if step <= newest]
    kept = [step for step in steps if find_damage(folder / str(step), contents=False) is None][-keep:]
    for step in steps:
        if step < kept[0]:
            with _removal(folder / str(step)):
                pass


@contextlib.contextmanager
def _removal(path: Path) -> Generator[None]:
    """Takes a checkpoint out of sight in one piece, lets the block put something in its place, then deletes it."""
    doomed = path.with_name(f"{UNFINISHED}removal-{path.name}")
    path.rename(doomed)
    yield
    _delete(doomed)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _part(index: int) -> str:
    return f"{MANIFEST}.part-{index}"


def _damage_anywhere(path: Path) -> tuple[bool, str | None]:
    """(whether any process found damage in its share, what was found: only on the first process that found some)."""
    damage = find_damage(path, processes())
    first = first_process(damage is not None)
    return first is not None, damage if first == processes()[0] else None


def _orbax() -> Any:
    """Orbax's v1 API, imported late: reading a configuration must start neither Orbax nor JAX."""
    from orbax.checkpoint import v1

    return v1


def _error_of(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def _one_line(path: Path, step: int | None, error: BaseException | None) -> str:
    reason = "the failure is another process's" if error is None else f"{type(error).__name__}: {error}"
    return f"the checkpoint of step {step} could not be written to {path}: " + " ".join(reason.split())


def _warn(message: str) -> None:
    print(f"WARNING: {message}", file=sys.stderr, flush=True)
