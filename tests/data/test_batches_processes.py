"""Two real processes of 4 devices: each reads half of every batch, and together they have the one-process batch."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from ep_jax.data import open_dataset
from ep_jax.data.batches import BatchStream
from ep_jax.mesh import AXES

ROOT = Path(__file__).parents[2]


def test_two_processes_read_their_own_rows_of_the_same_batch(corpus, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    script = Path(__file__).with_name("batches_process.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(process), address, tmp_path],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    outputs = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)

    results = [np.load(tmp_path / f"{process}.npz") for process in range(2)]
    train = open_dataset(corpus, vocab_size=259).train
    mesh = Mesh(np.array(jax.devices()).reshape(1, 4, 2), AXES)
    stream = BatchStream(train, seed=5, sequences_per_step=16, accumulation=2, mesh=mesh)
    step, batch = next(stream.from_step(4))
    for result in results:
        assert result["step"] == step == 4
        assert result["rows_read"].tolist() == [2, 4]  # of 2 x 8
        assert "processes [1] found other documents than process 0" in str(result["refused"])
    for name, array in batch._asdict().items():
        parts = {
            int(key.split(".")[1]): result[key] for result in results for key in result if key.startswith(f"{name}.")
        }
        assert sorted(parts) == list(range(8))
        np.testing.assert_array_equal(np.concatenate([parts[i] for i in range(8)], axis=1), np.asarray(array))
