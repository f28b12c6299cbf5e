"""Two real processes of 4 CPU devices meet and exchange; a missing one ends the wait in one line."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

from ep_jax import distributed, exits
from ep_jax.fields import ConfigError

EXCHANGE = """
import pathlib, sys
import numpy as np
from ep_jax import distributed, xla_flags
xla_flags.prepare("cpu", 4)
launch = distributed.initialize()
import jax
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((8,), ("ep",))
rows_SSH = np.arange(8 * 8 * 2, dtype=np.float32).reshape(8, 8, 2)  # [source, destination, feature]
sharding = NamedSharding(mesh, P("ep"))
rows = jax.make_array_from_callback(rows_SSH.shape, sharding, lambda index: rows_SSH[index])

def exchange(rows_1SH):
    received = jax.lax.all_to_all(rows_1SH, "ep", split_axis=1, concat_axis=1, tiled=True)
    # One after the other: a busy process may start independent ones in any order.
    return received, jax.lax.psum(received.sum(), "ep")

received, total = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=P("ep"), out_specs=(P("ep"), P())))(rows)
for shard in received.addressable_shards:
    np.testing.assert_array_equal(shard.data, rows_SSH.transpose(1, 0, 2)[shard.index])
assert float(total) == rows_SSH.sum(), float(total)
distributed.barrier("end of the test")
devices = len(jax.local_devices()), len(jax.devices())
report = launch.process_id, launch.num_processes, *devices, distributed.is_main()
pathlib.Path(sys.argv[1]).write_text(" ".join(map(str, report)))
"""


def environment(process_id, port, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_", "EP_JAX_"))}
    launcher = {
        "EP_JAX_COORDINATOR": f"localhost:{port}",
        "EP_JAX_NUM_PROCESSES": "2",
        "EP_JAX_PROCESS_ID": str(process_id),
    }
    return clean | {"JAX_PLATFORMS": "cpu"} | launcher | variables


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start(process_id, port, report="", **variables):
    return subprocess.Popen(
        [sys.executable, "-c", EXCHANGE, str(report)],
        env=environment(process_id, port, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes):
    """(exit code, stdout, stderr) of each; none is left running."""
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)  # waits for its end
            stack.callback(process.kill)
        outputs = [process.communicate(timeout=100) for process in processes]
        return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def test_two_processes_exchange_rows_and_sums(tmp_path):
    port = free_port()
    reports = [tmp_path / str(process_id) for process_id in (0, 1)]
    results = finish([start(process_id, port, report) for process_id, report in enumerate(reports)])
    for process_id, (code, out, err) in enumerate(results):
        assert code == 0, out + err
        assert reports[process_id].read_text() == f"{process_id} 2 4 8 {process_id == 0}"


@pytest.mark.parametrize("process_id", [0, 1])
def test_missing_process_ends_the_wait_in_one_line(process_id):
    port = free_port()
    began = time.monotonic()
    [(code, out, err)] = finish([start(process_id, port, EP_JAX_START_TIMEOUT_S="3")])
    assert time.monotonic() - began < 23
    assert code == exits.NO_RENDEZVOUS
    assert out == ""
    [line] = [line for line in err.splitlines() if "did not meet" in line]
    assert f"process {process_id} of 2 processes" in line
    assert f"coordinator localhost:{port} within 3 s" in line


def test_no_launcher_means_one_process():
    launch = distributed.detect({"PATH": "/bin"})
    assert (launch.launcher, launch.process_id, launch.num_processes) == ("single", 0, 1)
    assert distributed.initialize(launch) == launch
    distributed.barrier("one process waits for nobody")
    assert distributed.is_main()


@pytest.mark.parametrize(
    ("environ", "launcher", "process_id", "num_processes"),
    [
        (
            {
                "SLURM_NTASKS": "16",
                "SLURM_PROCID": "5",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_NODELIST": "rack[1-4]",
                "SLURM_JOB_ID": "77",
            },
            "slurm",
            5,
            16,
        ),
        ({"SLURM_NTASKS": "16", "SLURM_JOB_ID": "77", "SLURM_PROCID": "0"}, "single", 0, 1),  # shell inside a job
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3"},
            "openmpi",
            3,
            4,
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            "single",
            0,
            1,
        ),
        (environment(1, 1234, EP_JAX_NUM_PROCESSES="3"), "explicit", 1, 3),
        (environment(0, 1234, EP_JAX_NUM_PROCESSES="1"), "single", 0, 1),
    ],
)
def test_launchers_are_recognised(environ, launcher, process_id, num_processes):
    launch = distributed.detect(environ)
    assert (launch.launcher, launch.process_id, launch.num_processes) == (launcher, process_id, num_processes)
    assert launch.timeout_s == 120


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"EP_JAX_COORDINATOR": "host"}, "EP_JAX_COORDINATOR = 'host': expected host:port"),
        ({"EP_JAX_COORDINATOR": "host:99999"}, "expected host:port"),
        ({"EP_JAX_NUM_PROCESSES": "two"}, "EP_JAX_NUM_PROCESSES = 'two': expected an integer of at least 1"),
        ({"EP_JAX_PROCESS_ID": "2"}, "EP_JAX_PROCESS_ID = 2: allowed is 0 to 1"),
        ({"EP_JAX_PROCESS_ID": ""}, "EP_JAX_PROCESS_ID is not set"),
        ({"EP_JAX_START_TIMEOUT_S": "soon"}, "EP_JAX_START_TIMEOUT_S = 'soon': expected a number of seconds above 0"),
    ],
)
def test_malformed_variables_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        distributed.detect(environment(0, 1234, **changes))


def test_indexed_kubernetes_job_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: None)
    environ = {"KUBERNETES_SERVICE_HOST": "cluster", "JOB_COMPLETION_INDEX": "1"}
    with pytest.raises(ConfigError, match="the package kubernetes is not installed"):
        distributed.detect(environ)
