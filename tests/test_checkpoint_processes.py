"""Checkpoints where a process of its own is needed: a write that the system refuses, and two processes together."""

import socket
import subprocess
import sys

from ep_jax import checkpoint
from ep_jax.checkpoint import Point, newest_whole

FULL_DISK = """
import resource, sys
import jax, numpy as np
from ep_jax.checkpoint import Checkpointer, CheckpointConfig, CheckpointError

saver = Checkpointer(sys.argv[1], CheckpointConfig(keep=1))
saver.save(5, {"w": jax.numpy.zeros(8)}, {})
saver.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
saver.save(10, {"w": jax.numpy.asarray(np.random.default_rng(0).random(1 << 21))}, {})
try:
    saver.close()
except CheckpointError as error:
    print(error)
"""


def test_write_that_the_system_refuses_surfaces(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout
    assert output.startswith(f"the checkpoint of step 10 could not be written to {tmp_path / '10'}: ")
    assert "File too large" in output
    assert len(output.splitlines()) == 1
    assert checkpoint.steps_found(tmp_path) == [5]
    assert newest_whole(tmp_path) == Point(tmp_path, 5)


TWO_PROCESSES = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.experimental import multihost_utils

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
from ep_jax.agreement import AnyProcess
from ep_jax.checkpoint import Checkpointer, CheckpointConfig, CheckpointError, newest_whole

folder, me = Path(sys.argv[3]), jax.process_index()
mesh = jax.make_mesh((1, 2, 2), ("replica", "fsdp", "ep"))
split = jax.NamedSharding(mesh, jax.P(("fsdp", "ep")))
values = np.arange(512, dtype=np.float32).reshape(64, 8)
state = {"w": jax.make_array_from_callback((64, 8), split, lambda where: values[where])}
saver = Checkpointer(folder, CheckpointConfig(keep=2))
for step in (1, 2):
    saver.save(step, state, {"from": me})
    saver.check()
saver.wait()
print("-- newest", newest_whole(folder).step)

if me == 0:
    path = max((folder / "2").rglob("d/*"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])
multihost_utils.sync_global_devices("damaged")
other = jax.NamedSharding(mesh, jax.P("ep", "fsdp"))
restored, metadata = saver.restore({"w": jax.ShapeDtypeStruct((64, 8), np.float32, sharding=other)})
for shard in restored["w"].addressable_shards:
    np.testing.assert_array_equal(shard.data, values[shard.index])
print("-- restored", metadata)

anywhere = AnyProcess()
print("-- flags", [anywhere(me == 1 and call == 1) for call in range(4)])

if me == 0:
    (folder / "3").write_text("in the way")
saver.save(3, state, {})
try:
    saver.close()
except CheckpointError as error:
    print("-- failed", "step 3" in str(error), "another process" in str(error))
saver.close()
"""


def test_two_processes_write_verify_fall_back_and_fail_together(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(port), str(index), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in started]
    for index, (output, errors) in enumerate(outputs):
        assert started[index].returncode == 0, errors
        assert [line for line in output.splitlines() if line.startswith("-- ")] == [
            "-- newest 2",
            "-- restored {'from': 0}",
            "-- flags [False, False, True, False]",
            f"-- failed True {index == 1}",
        ]
    warnings = [line for _, errors in outputs for line in errors.splitlines() if line.startswith("WARNING: ")]
    assert len(warnings) == 1
    assert "falling back to step 1" in warnings[0]
