"""A sweep as a file for a scheduler instead of running it: a Slurm array job, or one Kubernetes JobSet a member.

The files start one process a member, on one host; what depends on the cluster is marked EDIT. Each task runs the same
command that `sweep.py` would, on the member's folder, so a task that was ended resumes when it is submitted again.
"""

import json
import re
import shlex
from collections.abc import Sequence

from ep_jax.sweeps import Member

SLURM = """\
#!/bin/bash
# {count} members of the sweep {name}. Submit it from the folder in which `python -m tools.sweep` was started, on
# storage that all hosts see; then `python -m tools.sweep {path} --collect` shows what came of it.
#SBATCH --job-name={label}
#SBATCH --array=0-{last}{limit}
#SBATCH --nodes=1 --ntasks=1
#SBATCH --output=/dev/null
# EDIT: #SBATCH --partition=... --gpus-per-node=... --time=..., and here what activates the Python environment
set -euo pipefail
members=(
{members}
)
folder=${{members[$SLURM_ARRAY_TASK_ID]}}
exec srun python -m ep_jax.train --config "$folder/member.toml" >> "$folder/output.txt" 2>&1
"""

# A JobSet fails as a whole, and members must not fail each other: hence one for each.
JOBSET = """\
# member {member}
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {label}
spec:
  network: {{enableDNSHostnames: false}}
  replicatedJobs:
    - name: train
      replicas: 1
      template:
        spec:
          completionMode: NonIndexed  # one process: nobody to meet
          completions: 1
          parallelism: 1
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 300  # SIGTERM saves a checkpoint
              containers:
                - name: train
                  image: EDIT
                  workingDir: /sweep
                  command: [python, -m, ep_jax.train, --config, {file}]
                  resources: {{limits: {{nvidia.com/gpu: 8}}}}  # EDIT
                  volumeMounts: [{{name: sweep, mountPath: /sweep}}]
              volumes:
                - name: sweep  # EDIT: the folder in which `python -m tools.sweep` was started
                  persistentVolumeClaim: {{claimName: EDIT}}
"""


def slurm(name: str, path: str, members: Sequence[Member], jobs: int | None) -> str:
    """The text of an sbatch file with one array task a member, at most `jobs` at once (None: as Slurm can)."""
    return SLURM.format(
        count=len(members),
        name=name,
        path=shlex.quote(path),
        label=_label(name),
        last=len(members) - 1,
        limit="" if jobs is None else f"%{jobs}",
        members="\n".join(f"  {shlex.quote(str(member.folder))}" for member in members),
    )


def jobset(name: str, path: str, members: Sequence[Member], jobs: int | None) -> str:
    """The text of a YAML file with one JobSet a member. How many run at once is the cluster's affair (Kueue)."""
    head = (
        f"# {len(members)} members of the sweep {name}, for `kubectl apply -f`; EDIT marks what your cluster needs.\n"
        f"# `python -m tools.sweep {shlex.quote(path)} --collect` shows what came of it.\n"
    )
    parts = [
        JOBSET.format(member=member.name, label=f"{_label(name)}-{number}", file=json.dumps(str(member.file)))
        for number, member in enumerate(members)
    ]
    return head + "---\n".join(parts)


def _label(name: str) -> str:
    """A name as Kubernetes and Slurm take it: lower-case letters, digits and dashes, short."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].rstrip("-") or "sweep"
