"""Training on real GPUs: kernels agree, transports agree, and a trace shows the phases.

Run on a machine with at least one GPU: `python -m pytest -m gpu tests/gpu`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.model.attention import attend
from ep_jax.profiling import read_trace

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
SMALL = """
[train]
steps = 12
sequences_per_step = 8
eval_sequences = 8
[mesh]
ep = -1
[data]
sequence_length = 256
[model]
num_layers = 2
model_dim = 256
head_dim = 64
latent_dim = 128
expert_hidden_dim = 128
compute_dtype = "bfloat16"
remat = "exchanges"
[ep]
sender_factor = 16.0
receiver_factor = 16.0
[log]
every = 1
"""


@pytest.mark.parametrize("fused", ["cudnn", "tokamax"])
@pytest.mark.parametrize("window", [0, 3, 100])  # a short one, so that a window off by one shows
def test_fused_attention_equals_xla(fused, window):
    """Values and gradients of both kernels, with documents, padding and grouped heads."""
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (2, 512, 8, 64), jnp.bfloat16)
    k, v = (jax.random.normal(key, (2, 512, 2, 64), jnp.bfloat16) for key in keys[1:3])
    d_out = jax.random.normal(keys[3], q.shape, jnp.bfloat16)
    segments = jnp.cumsum(jnp.zeros((2, 512), jnp.int32).at[:, ::150].set(1), axis=1).at[1, 480:].set(0)

    def objective(q, k, v, kernel):
        out = attend(q, k, v, segments, window=window, kernel=kernel)
        return (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(), out

    both = [
        jax.jit(jax.grad(objective, argnums=(0, 1, 2), has_aux=True), static_argnames="kernel")(q, k, v, kernel=kernel)
        for kernel in ("xla", fused)
    ]
    for first, second in zip(*map(jax.tree.leaves, both), strict=True):
        first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
        assert np.linalg.norm(first - second) < 1e-2 * np.linalg.norm(first)


def train(folder: Path, *arguments: str) -> list[dict]:
    config = folder / "small.toml"
    config.write_text(SMALL)
    command = [
        sys.executable,
        "-m",
        "ep_jax.train",
        "--config",
        str(config),
        "--run_dir",
        str(folder / "run"),
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_transports_train_alike(tmp_path):
    """Forward and backward under the flags of production: 12 steps of every transport, nothing dropped."""
    losses = {}
    for transport in ("pooled_wave", "ragged", "dense"):
        folder = tmp_path / transport
        folder.mkdir()
        rows = train(folder, "--ep.transport", transport)
        losses[transport] = np.array([row["loss"] for row in rows])
        assert max(row["drop_rate"] for row in rows) == 0
    assert losses["pooled_wave"][-1] < losses["pooled_wave"][0] - 0.5
    for transport in ("ragged", "dense"):  # bfloat16 sums differ in order
        np.testing.assert_allclose(losses[transport], losses["pooled_wave"], rtol=5e-3)


def test_a_run_that_stops_and_goes_on_has_the_bits_of_the_one_that_never_stopped(tmp_path):
    """Three processes: a run, its second half again from the checkpoint, and all of it again; one compiled program."""
    arguments = ["--checkpoint.every", "6", "--train.compilation_cache", str(tmp_path / "programs")]
    for name in ("straight", "resumed", "again"):
        (tmp_path / name).mkdir()
    straight = train(tmp_path / "straight", *arguments)
    shutil.copytree(tmp_path / "straight" / "run", tmp_path / "resumed" / "run")
    shutil.rmtree(tmp_path / "resumed" / "run" / "checkpoints" / "12")
    for name in ("resumed", "again"):
        rows = train(tmp_path / name, *arguments)
        for quantity in ("step", "loss", "grad_norm", "drop_rate"):
            assert [row[quantity] for row in rows] == [row[quantity] for row in straight], (name, quantity)


def test_trace_shows_the_phases(tmp_path):
    """A GPU trace names the phases of the layer, so that time can be charged to them."""
    train(tmp_path, "--profile.steps", "5:8")
    events = read_trace(tmp_path / "run" / "profile", with_stats=True)
    text = " ".join(str(stat) for event in events if "GPU" in event.plane for stat in event.stats.values())
    for scope in ("route", "dispatch", "experts", "combine"):
        assert f"/{scope}/" in text, scope
