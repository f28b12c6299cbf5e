"""Joins the processes of a run, or finds that there is only one.

`detect()` reads the launcher's environment, `initialize()` meets the other processes within a bounded time. Not here:
which device does what (mesh.py), and XLA flags (xla_flags.py).

Slurm, Open MPI and indexed Kubernetes jobs are recognised and need nothing. Anywhere else, set for each process

    EP_JAX_COORDINATOR     host:port of process 0, reachable from every host
    EP_JAX_NUM_PROCESSES   how many processes there are
    EP_JAX_PROCESS_ID      0 .. that number - 1

EP_JAX_START_TIMEOUT_S (default 120) bounds the wait for the others in every case.
"""

import contextlib
import dataclasses
import importlib.util
import os
import sys
import threading
from collections.abc import Generator, Mapping

from ep_jax import exits
from ep_jax.fields import ConfigError

DEFAULT_TIMEOUT_S = 120.0
EXPLICIT_VARIABLES = ("EP_JAX_COORDINATOR", "EP_JAX_NUM_PROCESSES", "EP_JAX_PROCESS_ID")
TIMEOUT_VARIABLE = "EP_JAX_START_TIMEOUT_S"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """How this process was started. A number is None where only the launcher's own service knows it."""

    launcher: str  # "single", "explicit", "slurm", "openmpi" or "kubernetes"
    coordinator: str = ""
    process_id: int | None = 0
    num_processes: int | None = 1
    timeout_s: float = DEFAULT_TIMEOUT_S


def detect(environ: Mapping[str, str] = os.environ) -> Launch:
    """Reads the launcher's variables; starts nothing and imports no JAX.

    Raises ConfigError when the EP_JAX_ variables are incomplete or malformed.
    """
    timeout_s = _positive_number(environ, TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S)
    if any(name in environ for name in EXPLICIT_VARIABLES):
        return _explicit(environ, timeout_s)
    if _tasks(environ, "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID") > 1:
        return Launch(
            launcher="slurm",
            coordinator=f"first of {environ['SLURM_STEP_NODELIST']}",
            process_id=int(environ["SLURM_PROCID"]),
            num_processes=int(environ["SLURM_NTASKS"]),
            timeout_s=timeout_s,
        )
    if _tasks(environ, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") > 1:
        return Launch(
            launcher="openmpi",
            coordinator="the host of mpirun",
            process_id=int(environ["OMPI_COMM_WORLD_RANK"]),
            num_processes=int(environ["OMPI_COMM_WORLD_SIZE"]),
            timeout_s=timeout_s,
        )
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        if importlib.util.find_spec("kubernetes") is None:
            raise ConfigError(
                "this is an indexed Kubernetes job, but the package kubernetes is not installed: "
                f"install it, or set {', '.join(EXPLICIT_VARIABLES)}"
            )
        return Launch(
            launcher="kubernetes",
            coordinator="pod 0 of the job",
            process_id=int(environ["JOB_COMPLETION_INDEX"]),
            num_processes=None,
            timeout_s=timeout_s,
        )
    return Launch(launcher="single", timeout_s=timeout_s)


def initialize(launch: Launch | None = None) -> Launch:
    """Meets the other processes, before JAX starts its backend; does nothing for a single process.

    When they are not complete within `launch.timeout_s`, this process prints one line naming coordinator, process and
    expected number and exits with exits.NO_RENDEZVOUS. Returns the launch with every number filled in.
    """
    launch = launch or detect()
    if launch.launcher == "single":
        return launch

    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's own time-out ends the process from C++ with a stack trace, so it is set to come after ours.
    late_s = int(launch.timeout_s) + 60
    with _exit_when_late(launch):
        if launch.launcher == "explicit":
            jax.distributed.initialize(
                launch.coordinator,
                launch.num_processes,
                launch.process_id,
                cluster_detection_method="deactivate",
                initialization_timeout=late_s,
            )
        else:
            jax.distributed.initialize(initialization_timeout=late_s)
        # The first look at the devices exchanges them between the processes and waits for all of them as well.
        process_id, num_processes = jax.process_index(), jax.process_count()
    return dataclasses.replace(launch, process_id=process_id, num_processes=num_processes)


def is_main() -> bool:
    """True in the one process that prints and writes shared files; starts JAX's backend."""
    import jax

    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns once every process has called it with the same name; immediately for a single process."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def _exit_when_late(launch: Launch) -> Generator[None]:
    """Ends the process when the block takes longer than the launch allows: a blocked C++ call takes no exception."""
    timer = threading.Timer(launch.timeout_s, _exit_late, [launch])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _exit_late(launch: Launch) -> None:
    expected = "the job's" if launch.num_processes is None else launch.num_processes
    print(
        f"process {launch.process_id} of {expected} processes ({launch.launcher}): the others did not meet at "
        f"coordinator {launch.coordinator} within {launch.timeout_s:g} s; are all of them running and is the address "
        f"reachable from every host? ({TIMEOUT_VARIABLE} sets the wait)",
        file=sys.stderr,
        flush=True,
    )
    os._exit(exits.NO_RENDEZVOUS)


def _explicit(environ: Mapping[str, str], timeout_s: float) -> Launch:
    missing = [name for name in EXPLICIT_VARIABLES if not environ.get(name)]
    if missing:
        raise ConfigError(f"{missing[0]} is not set: allowed is all of {', '.join(EXPLICIT_VARIABLES)}, or none")
    coordinator = environ["EP_JAX_COORDINATOR"]
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"EP_JAX_COORDINATOR = {coordinator!r}: expected host:port")
    num_processes = _integer(environ, "EP_JAX_NUM_PROCESSES", at_least=1)
    process_id = _integer(environ, "EP_JAX_PROCESS_ID", at_least=0)
    if process_id >= num_processes:
        raise ConfigError(f"EP_JAX_PROCESS_ID = {process_id}: allowed is 0 to {num_processes - 1}")
    if num_processes == 1:
        return Launch(launcher="single", timeout_s=timeout_s)
    return Launch(
        launcher="explicit",
        coordinator=coordinator,
        process_id=process_id,
        num_processes=num_processes,
        timeout_s=timeout_s,
    )


def _tasks(environ: Mapping[str, str], size: str, *others: str) -> int:
    """The number of tasks of a launcher, 1 unless it set every variable JAX needs (a shell inside a job has some)."""
    return _integer(environ, size, at_least=1) if all(name in environ for name in (size, *others)) else 1


def _integer(environ: Mapping[str, str], name: str, *, at_least: int) -> int:
    text = environ[name]
    if not text.isdecimal() or int(text) < at_least:
        raise ConfigError(f"{name} = {text!r}: expected an integer of at least {at_least}")
    return int(text)


def _positive_number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} = {text!r}: expected a number of seconds above 0")
    return value
