"""A really small run for the tests of this folder: its configuration, hand-made batches, and how to start it.

Letters: M microbatches, B rows of a microbatch, L tokens of a row.
"""

import contextlib
import dataclasses
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ep_jax import evaluate, train
from ep_jax.checkpoint import CHECKPOINTS, read_metadata, whole
from ep_jax.config import CONFIG_FILE, RunConfig, load
from ep_jax.data import Batch
from ep_jax.data.batches import BatchStream
from ep_jax.mesh import AXES, make_mesh
from ep_jax.model.config import ModelConfig
from ep_jax.report import EVALUATIONS_FILE, SUMMARY_FILE
from ep_jax.state import init_state, restore_state, state_shardings, state_target
from ep_jax.step import BATCH_SPEC, make_train_step
from ep_jax.trackers import METRICS_FILE, read_rows

ROOT = Path(__file__).parents[2]
QUICK_COMPILE = {"xla_backend_optimization_level": 0}
NO_DROP = 16.0  # so large that every capacity is the most that can occur
CLOCK = ("tokens_per_second", "step_ms", "mfu", "mfu_kept", "peak_memory_bytes")  # what two equal runs may differ in
SIZES = {
    "train.steps": 10,
    "train.sequences_per_step": 8,
    "train.eval_sequences": 8,
    "data.sequence_length": 16,
    "data.held_out_fraction": 0.25,
    "data.prefetch": 1,
    "model.num_layers": 2,
    "model.model_dim": 32,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_dim": 16,
    "model.latent_dim": 16,
    "model.expert_hidden_dim": 16,
    "model.shared_hidden_dim": 16,
    "router.num_experts": 8,
    "router.histogram_bins": 256,
    "optimizer.learning_rate": 0.01,
    "optimizer.warmup_steps": 8,
    "log.every": 1,
}
STRAIGHT = {"checkpoint__every": 5, "train__eval_every": 5}  # of the run that the others are compared with


def settings(mesh_shape: tuple[int, int, int] = (1, 2, 4), **changes: Any) -> dict[str, str]:
    """Dotted names and texts of the small configuration on a mesh; changes are named section__key."""
    mesh = dict(zip([f"mesh.{axis}" for axis in AXES], mesh_shape, strict=True))
    values = SIZES | mesh | {name.replace("__", "."): value for name, value in changes.items()}
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}


def tiny_config(mesh_shape: tuple[int, int, int] = (1, 2, 4), *, drops: bool = False, **changes: Any) -> RunConfig:
    """The small configuration; with drops = False no capacity can bind."""
    factors = {} if drops else {"ep__sender_factor": NO_DROP, "ep__receiver_factor": NO_DROP}
    return load(None, list(settings(mesh_shape, **factors | changes).items()))


def mesh_of(config: RunConfig) -> Mesh:
    return make_mesh(config.mesh, jax.devices()[: config.mesh.size])


@functools.cache
def compiled_step(config: RunConfig) -> Any:
    """The training step compiled, in a hurry: shared by the tests of the session, which call it a few times only."""
    mesh, parts = mesh_of(config), config.train.accumulation
    shape = (parts, config.train.sequences_per_step // parts, config.data.sequence_length)
    sharding = NamedSharding(mesh, BATCH_SPEC)
    kinds = Batch(*(np.int32,) * len(Batch._fields))._replace(valid=np.bool_)
    batch = jax.tree.map(lambda kind: jax.ShapeDtypeStruct(shape, kind, sharding=sharding), kinds)
    return make_train_step(config, mesh).lower(state_target(config, mesh), batch).compile(QUICK_COMPILE)


@functools.cache
def _initial_state(model: ModelConfig) -> Any:
    config = dataclasses.replace(tiny_config(), model=model)
    return jax.device_get(init_state(config, mesh_of(config)))


def fresh_state(config: RunConfig) -> Any:
    """A state before the first step, of its own buffers: the step donates them. The same for every mesh."""
    return placed(_initial_state(dataclasses.replace(config.model, remat="none")), config)


def placed(state: Any, config: RunConfig) -> Any:
    """A host copy of a state on the devices."""
    copies = jax.tree.map(np.array, state)
    return jax.device_put(copies, state_shardings(config, mesh_of(config)))


def take_steps(config: RunConfig, state: Any, batches: list[Batch]) -> tuple[Any, list[Any]]:
    """The state after one step a batch, and the host metrics of each."""
    metrics = []
    for batch in batches:
        on_mesh = jax.device_put(batch, NamedSharding(mesh_of(config), BATCH_SPEC))
        state, of_step = compiled_step(config)(state, on_mesh)
        metrics.append(jax.device_get(of_step))
    return state, metrics


def gradients_after_one_step(config: RunConfig, state: Any) -> Any:
    """The (clipped) gradients of the first step, read off Adam's mean: mean = (1 - b1) * gradient."""
    [adam] = [part for part in jax.tree.leaves(state["opt_state"], is_leaf=_is_adam) if _is_adam(part)]
    return jax.tree.map(lambda mean: np.asarray(mean) / (1 - config.optimizer.b1), adam.mu)


def _is_adam(part: Any) -> bool:
    return hasattr(part, "mu")


def make_batch(seed: int = 0, *, M: int = 1, B: int = 8, L: int = 16, vocab: int = 259) -> Batch:
    """NumPy [M, B, L]: two documents a row, then up to 5 columns of padding."""
    rng = np.random.default_rng(seed)
    column = np.arange(L)
    cut, end = rng.integers(3, 9, (M, B, 1)), rng.integers(L - 5, L + 1, (M, B, 1))
    valid = column < end
    tokens = rng.integers(0, vocab, (M, B, L + 1))
    return Batch(
        tokens=np.where(valid, tokens[..., :-1], 0).astype(np.int32),
        targets=np.where(valid, tokens[..., 1:], 0).astype(np.int32),
        valid=valid,
        segments=np.where(valid, 1 + (column >= cut), 0).astype(np.int32),
        positions=np.where(valid, column - np.where(column >= cut, cut, 0), 0).astype(np.int32),
    )


def without(batch: Batch, rows: Any) -> Batch:
    """The batch with some rows of every microbatch all padding."""
    batch = Batch(*(array.copy() for array in batch))
    for array in batch:
        array[:, rows] = 0
    return batch


class Finished(NamedTuple):
    """How a command ended."""

    code: int
    out: str  # stdout
    err: str


def run_here(main: Callable[[list[str]], int], *argv: Any) -> Finished:
    """Runs a command's main in this process, on its 8 devices. Raises what it raises."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in argv])
    return Finished(code, out.getvalue(), err.getvalue())


def options(corpus: Path, folder: Path, mesh_shape: tuple[int, int, int] = (1, 2, 4), **changes: Any) -> list[str]:
    """Command line of a small run on a folder of text."""
    data = {"data__source": "text", "data__path": corpus, "data__cache_dir": corpus.parent / "cache"}
    named = {"run_dir": folder, **settings(mesh_shape, **data | changes)}
    return [f"--{name}={value}" for name, value in named.items()]


def train_here(corpus: Path, folder: Path, mesh_shape: tuple[int, int, int] = (1, 2, 4), **changes: Any) -> Finished:
    return run_here(train.main, *options(corpus, folder, mesh_shape, **changes))


def evaluate_here(folder: Path, *argv: str) -> Finished:
    return run_here(evaluate.main, "--run", folder, *argv)


def start_process(*argv: Any, module: str = "ep_jax.train", cwd: Path = ROOT, **variables: str) -> subprocess.Popen:
    """A command in a process of its own, from any folder; variables come on top of a clean environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_", "EP_JAX_"))}
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, argv)],
        cwd=cwd,
        env=clean | own | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes: subprocess.Popen, timeout_s: float = 240) -> list[Finished]:
    """Waits for processes; none is left running."""
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    return [Finished(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def on_batch(monkeypatch, action: Callable[[int], None]) -> None:
    """Calls action(steps done) just before the training loop gets each batch."""
    original = BatchStream.from_step

    def from_step(self: BatchStream, start_step: int = 0) -> Iterator[tuple[int, Batch]]:
        with contextlib.closing(original(self, start_step)) as batches:
            for index, batch in batches:
                action(index)
                yield index, batch

    monkeypatch.setattr(BatchStream, "from_step", from_step)


def terminate() -> None:
    """Sends SIGTERM to this process, as a scheduler would; fails where it would end the tests."""
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)


def copy_run(source: Path, target: Path) -> Path:
    """A copy of a run folder in which the files keep their times."""
    return Path(shutil.copytree(source, target))


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Time of change and bytes of every file of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what the clock says."""
    rows = read_rows(folder / METRICS_FILE)
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


def losses_of(folder: Path) -> np.ndarray:
    """The loss of every step, float64."""
    return np.array([row["loss"] for row in rows_of(folder)])


def evaluations_of(folder: Path) -> list[dict[str, Any]]:
    """The held-out losses during training."""
    return read_rows(folder / EVALUATIONS_FILE)


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / SUMMARY_FILE).read_text())


def config_of(folder: Path) -> RunConfig:
    return load(str(folder / CONFIG_FILE))


def saved(folder: Path, step: int) -> tuple[Any, dict[str, Any]]:
    """(state on the host, metadata) of a verified checkpoint of a run."""
    config, point = config_of(folder), whole(folder / CHECKPOINTS, step)
    return jax.device_get(restore_state(config, mesh_of(config), point)), read_metadata(point)


def assert_same_bits(got: Any, wanted: Any) -> None:
    def compare(path, a, b):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)

    jax.tree.map_with_path(compare, got, wanted)


def assert_close(got: Any, wanted: Any, tolerance: float) -> None:
    """Largest error over largest reference, leaf by leaf."""

    def compare(path, a, b):
        a, b = np.asarray(a), np.asarray(b)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), jax.tree_util.keystr(path)

    jax.tree.map_with_path(compare, got, wanted)
