"""The launch templates, dry: what each would start is read by the trainer's own command line and process detection.

Slurm and the trainer are stand-ins. `srun` starts two tasks with the variables that Slurm sets; `python` reads its
command line with ep_jax and reports, or meets the other task for real and reports what it found.
"""

import contextlib
import json
import os
import random
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ep_jax import distributed, exits
from ep_jax.cli import parse_args
from ep_jax.config import RunConfig, check_run, placed

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "tools" / "launch"
TASKS = 2
LIMIT_S = 100
FOREIGN = ("XLA_", "JAX_", "EP_JAX_", "SLURM_", "OMPI_", "KUBERNETES_")  # variables that tests must not inherit
FIRST_PORT, PORTS = 61440, 4096  # of JAX's coordinators under Slurm

SRUN = f"""\
#!{sys.executable}
import json, os, subprocess, sys
words = sys.argv[1:]
command = next(place for place, word in enumerate(words) if not word.startswith("--"))
open(os.environ["STUB_SRUN_OPTIONS"], "w").write(json.dumps(words[:command]))
slurm = {{"SLURM_NTASKS": "{TASKS}", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1"}}
tasks = [
    subprocess.Popen(words[command:], env=os.environ | slurm | {{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}})
    for i in range({TASKS})
]
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))  # as srun does: the highest, signals above 128
"""
PYTHON = f"""\
#!/bin/bash
exec {shlex.quote(sys.executable)} -c "$STUB_PYTHON" "$@"
"""
READ = """
import dataclasses, json, os, sys
from ep_jax import distributed
launch = dataclasses.asdict(distributed.detect())
report = json.dumps({"words": sys.argv[1:], "launch": launch})
os.write(1, f"\\nREPORT {report}\\n".encode())  # in one piece, whatever the other task prints
sys.exit(int(os.environ["STUB_CODE"]))
"""
MEET = """
import json, os, sys
from ep_jax import distributed, xla_flags
xla_flags.prepare("cpu", 1)
launch = distributed.initialize()
import jax
from jax._src.distributed import global_state
found = [launch.launcher, jax.process_index(), jax.process_count(), global_state.coordinator_address]
report = json.dumps({"words": sys.argv[1:], "found": found})
os.write(1, f"\\nREPORT {report}\\n".encode())
"""


def stubs(folder, **programs):
    """Environment of a node: the given commands stand before the real ones, and ep_jax can be imported."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    own = {"PATH": f"{folder}:{kept['PATH']}", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "STUB_CODE": "0"}
    return kept | own


def reports(out):
    return [json.loads(line.removeprefix("REPORT ")) for line in out.splitlines() if line.startswith("REPORT ")]


def configuration(words) -> RunConfig:
    """What `python -m ep_jax.train` makes of a command line."""
    assert words[:2] == ["-m", "ep_jax.train"]
    return parse_args(words[2:], command="train", description="")


def check_fits(config, *, boxes, gpus):
    """The run can start on so many boxes: mesh, batch and experts divide, and an ep group stays in a box."""
    config = placed(config, boxes * gpus)
    check_run(config)
    assert config.mesh.domain_size == gpus
    assert gpus % config.mesh.ep == 0
    assert config.checkpoint.every > 0
    assert config.resume == "auto"


def finish(processes):
    """(exit code, stdout, stderr) of each; none is left running."""
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
        return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def free_port(wanted=0):
    """A port nobody listens on; `wanted` itself, else an OSError."""
    with socket.socket() as probe:
        probe.bind(("localhost", wanted))
        return probe.getsockname()[1]


def free_job():
    """A Slurm job number whose port is free: JAX takes the port from the number."""
    while True:
        job = random.randrange(PORTS)
        with contextlib.suppress(OSError):
            free_port(FIRST_PORT + job)
            return job


# Slurm


def sbatch_options():
    """The options of the #SBATCH lines by name; Slurm reads none after the first command."""
    head, *rest = re.split(r"^[^#\n]", (TEMPLATES / "sbatch.sh").read_text(), maxsplit=1, flags=re.M)
    assert "#SBATCH" not in rest[0]
    words = " ".join(re.findall(r"^#SBATCH (.*)$", head, flags=re.M)).split()
    return dict(word.removeprefix("--").partition("=")[::2] for word in words)


def run_sbatch(folder, code=0, program=READ, job=4711, restarts=0):
    """Runs the batch script: (its exit code, what the tasks reported, what scontrol was asked, srun's options)."""
    environ = stubs(folder, srun=SRUN, python=PYTHON, scontrol='#!/bin/bash\necho "$@" >> "$STUB_ASKED"\n')
    asked, options = folder / "asked", folder / "options"
    job_variables = {"SLURM_JOB_ID": str(job), "SLURM_CPUS_PER_TASK": "8", "STUB_ASKED": str(asked)}
    job_variables |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    stub_variables = {"STUB_PYTHON": program, "STUB_CODE": str(code), "STUB_SRUN_OPTIONS": str(options)}
    job_run = subprocess.run(
        ["bash", str(TEMPLATES / "sbatch.sh")],
        env=environ | job_variables | stub_variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    requests = asked.read_text().splitlines() if asked.exists() else []
    return job_run.returncode, reports(job_run.stdout), requests, json.loads(options.read_text())


def test_sbatch_is_sound_and_asks_for_one_process_a_gpu():
    subprocess.run(["bash", "-n", str(TEMPLATES / "sbatch.sh")], check=True)
    options = sbatch_options()
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert {"requeue", "partition", "time", "cpus-per-task"} <= options.keys()
    assert options["open-mode"] == "append"  # what ran before a requeue stays readable
    assert re.fullmatch(r"TERM@\d+", options["signal"])  # without B: to the processes, not to the script
    assert int(options["signal"].partition("@")[2]) >= 120


def test_sbatch_starts_what_the_trainer_and_its_detection_accept(tmp_path):
    code, found, requests, srun = run_sbatch(tmp_path)
    assert (code, requests) == (exits.DONE, [])
    launches = sorted((report["launch"] for report in found), key=lambda launch: launch["process_id"])
    for rank, launch in enumerate(launches):
        assert (launch["launcher"], launch["process_id"], launch["num_processes"]) == ("slurm", rank, TASKS)
        assert launch["coordinator"] == "first of localhost"
        assert launch["timeout_s"] > distributed.DEFAULT_TIMEOUT_S
    assert found[0]["words"] == found[1]["words"]
    options = sbatch_options()
    config = configuration(found[0]["words"])
    check_fits(config, boxes=int(options["nodes"]), gpus=int(options["gpus-per-node"]))
    assert config.run_dir == "runs/h200"
    # Cores are not inherited from sbatch; a bound GPU would be device 0 of every process, and JAX asks for its rank.
    assert {"--cpus-per-task=8", "--gpu-bind=none", "--distribution=block", "--kill-on-bad-exit=0"} == set(srun)


@pytest.mark.parametrize(
    ("code", "requests"),
    [
        (exits.INTERRUPTED, ["requeue 4711"]),
        (exits.HUNG, ["requeue 4711"]),
        (exits.REFUSED, []),
        (exits.NON_FINITE, []),
        (137, []),
    ],
)
def test_sbatch_requeues_only_what_was_saved(tmp_path, code, requests):
    assert run_sbatch(tmp_path, code=code)[::2] == (code, requests)


def test_sbatch_does_not_start_a_run_that_stands_still_forever(tmp_path):
    assert run_sbatch(tmp_path, code=exits.HUNG, restarts=10)[::2] == (exits.HUNG, [])


def test_processes_of_sbatch_meet_without_arguments(tmp_path):
    job = free_job()
    code, found, _, _ = run_sbatch(tmp_path, program=MEET, job=job)
    assert code == 0
    expected = [["slurm", rank, TASKS, f"localhost:{FIRST_PORT + job}"] for rank in range(TASKS)]
    assert sorted(report["found"] for report in found) == expected


# Kubernetes


@pytest.fixture
def jobset():
    return yaml.safe_load((TEMPLATES / "jobset.yaml").read_text())


def job_of(jobset):
    [job] = jobset["spec"]["replicatedJobs"]
    assert job["replicas"] == 1
    return job["template"]["spec"]


def test_jobset_runs_one_indexed_pod_a_box(jobset, monkeypatch):
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    job = job_of(jobset)
    assert job["completionMode"] == "Indexed"
    boxes = job["completions"]
    assert job["parallelism"] == boxes > 1
    pod = job["template"]["spec"]
    assert pod["serviceAccountName"]  # may list pods and read the job: JAX asks for number and coordinator
    [container] = pod["containers"]
    assert container["command"][0] == "python"
    assert all(isinstance(word, str) for word in container["args"])  # Kubernetes refuses a number
    config = configuration(container["command"][1:] + container["args"])
    check_fits(config, boxes=boxes, gpus=container["resources"]["limits"]["nvidia.com/gpu"])
    [mount] = container["volumeMounts"]
    assert config.folder.is_relative_to(mount["mountPath"])
    assert [volume["name"] for volume in pod["volumes"]] == [mount["name"]]

    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: name)
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    for index in range(boxes):
        added = {"KUBERNETES_SERVICE_HOST": "cluster", "JOB_COMPLETION_INDEX": str(index)}
        launch = distributed.detect(given | added)
        assert (launch.launcher, launch.process_id) == ("kubernetes", index)
        assert launch.timeout_s > distributed.DEFAULT_TIMEOUT_S


def test_jobset_restarts_what_was_saved_as_often_as_needed(jobset):
    job = job_of(jobset)
    assert job["backoffLimit"] == 0
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # a condition of podFailurePolicy
    saved, disrupted = job["podFailurePolicy"]["rules"]
    assert saved == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [exits.INTERRUPTED]}}
    assert disrupted == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    policy = jobset["spec"]["failurePolicy"]
    assert policy["rules"] == [
        {"action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    assert policy["maxRestarts"] > 0
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] >= 120


# SkyPilot


@pytest.fixture
def task():
    return yaml.safe_load((TEMPLATES / "skypilot.yaml").read_text())


def start_skypilot(folder, task, rank, program, run=None):
    """One box of the task, with the variables that SkyPilot sets."""
    sky = {
        "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1", "127.0.0.2"]),
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "HOME": str(folder),
    }
    (folder / "ep_jax" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "ep_jax" / "bin" / "activate").write_text("")
    environ = stubs(folder, python=PYTHON) | task["envs"] | sky | {"STUB_PYTHON": program}
    command = ["bash", "-c", run or task["run"]]
    return subprocess.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_skypilot_names_nodes_recovery_and_shared_storage(task):
    assert task["num_nodes"] == TASKS
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [exits.INTERRUPTED]
    assert task["resources"]["job_recovery"]["max_restarts_on_errors"] > 0
    [mount] = task["volumes"]
    assert Path(task["envs"]["RUN_DIR"]).is_relative_to(mount)
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)


def test_skypilot_starts_what_the_trainer_and_its_detection_accept(tmp_path, task):
    boxes = [start_skypilot(tmp_path, task, rank, READ) for rank in range(TASKS)]
    gpus = int(task["resources"]["accelerators"].partition(":")[2])
    for rank, (code, out, err) in enumerate(finish(boxes)):
        assert code == 0, err
        [report] = reports(out)
        launch = report["launch"]
        assert (launch["launcher"], launch["process_id"], launch["num_processes"]) == ("explicit", rank, TASKS)
        assert launch["coordinator"] == "127.0.0.1:8476"  # the first box, for both
        assert launch["timeout_s"] > distributed.DEFAULT_TIMEOUT_S
        config = configuration(report["words"])
        check_fits(config, boxes=task["num_nodes"], gpus=gpus)
        assert config.run_dir == task["envs"]["RUN_DIR"]


def test_processes_of_skypilot_meet(tmp_path, task):
    port = free_port()
    run = task["run"].replace(":8476", f":{port}")
    boxes = [start_skypilot(tmp_path, task, rank, MEET, run) for rank in range(TASKS)]
    found = []
    for code, out, err in finish(boxes):
        assert code == 0, err
        found += [report["found"] for report in reports(out)]
    assert found == [["explicit", rank, TASKS, f"127.0.0.1:{port}"] for rank in range(TASKS)]


@pytest.mark.parametrize("name", ["sbatch.sh", "jobset.yaml", "skypilot.yaml"])
def test_templates_stay_short_and_name_what_is_edited(name):
    text = (TEMPLATES / name).read_text()
    assert len(text.splitlines()) < 50
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "EDIT" in text
