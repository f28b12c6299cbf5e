"""`tools.compile` with the CUDA plugin: a small step for two pretended GPUs. Needs the plugin, not the GPUs.

Run on a machine with the plugin: `python -m pytest -m gpu tests/gpu/test_gpu_compile.py`, without a GPU with
`--noconftest` beside it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ep_jax import exits

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "train.steps": "12",
    "train.sequences_per_step": "8",
    "train.eval_sequences": "8",
    "train.accumulation": "2",
    "mesh.ep": "-1",
    "data.sequence_length": "256",
    "model.num_layers": "2",
    "model.model_dim": "512",
    "model.head_dim": "64",
    "model.latent_dim": "512",
    "model.expert_hidden_dim": "256",
    "model.compute_dtype": "bfloat16",
    "model.scan": "false",
    "ep.transport": "auto",
}


def compiled(folder: Path, devices: int, **changes: str) -> tuple[str, dict]:
    """(What is printed, the JSON file) of a small step, compiled for GPUs that are not there."""
    settings = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "tools.compile", "--hardware", "h200_8", "--devices", str(devices)]
    command += ["--json", str(folder / "report.json"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == exits.DONE, done.stderr
    return done.stdout, json.loads((folder / "report.json").read_text())


def test_two_pretended_gpus_write_into_each_other(tmp_path):
    out, report = compiled(tmp_path, 2)
    assert "note: ep.transport = auto: rowwise\n" in out
    assert max(map(len, out.splitlines())) <= 100
    assert report["mesh"] == "replica 1 x fsdp 1 x ep 2"
    assert report["attention"] == "tokamax"
    calls = report["program"]["custom_calls"]
    assert calls["mosaic_gpu_v2"] > 0
    assert calls["triton_kernel_call"] > 0
    assert report["program"]["collectives"]["all-gather"] > 0
    assert "all-to-all" not in report["program"]["collectives"]
    memory = report["memory"]
    assert memory["temporary_bytes"] > 0
    assert memory["aliased_bytes"] > 0.9 * memory["arguments_bytes"] - memory["outputs_bytes"]  # the state is donated
    assert sum(row["bytes"] for row in report["largest_at_peak"]) <= 1.01 * memory["temporary_bytes"]


def test_one_pretended_gpu_sends_nothing(tmp_path):
    out, report = compiled(tmp_path, 1)
    assert "note: ep.transport = auto: dense" in out
    assert report["program"]["collectives"] == {}
    assert report["program"]["custom_calls"]["triton_kernel_call"] > 0
