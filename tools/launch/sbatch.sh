#!/bin/bash
# A training run on several GPU boxes under Slurm, one process a GPU. Edit what stands above the line, then
# `sbatch tools/launch/sbatch.sh` from the checkout, on storage that all boxes see. The run saves before its time limit
# and queues itself again until its last step is done; `scancel --signal=TERM JOB` makes it save and requeue at once.
#SBATCH --job-name=ep-jax --output=%x-%j.txt --open-mode=append --requeue
# boxes
#SBATCH --nodes=2
# GPUs of a box, and as many processes
#SBATCH --gpus-per-node=8 --ntasks-per-node=8
# CPU cores of a process: compilation and data
#SBATCH --cpus-per-task=8
# your cluster's partition
#SBATCH --partition=EDIT
# time limit, and how many seconds before it the processes get SIGTERM: enough to write a checkpoint
#SBATCH --time=24:00:00 --signal=TERM@180
# a file, or the name of a shipped configuration
CONFIG=configs/h200.toml
# the run's folder, on storage that all boxes see; started again, the run goes on from the checkpoints in it
RUN_DIR=runs/h200
# replica x fsdp x ep are all GPUs, ep stays in an NVLink domain; checkpoint.every bounds what a crash costs
OPTIONS=(--mesh.replica 2 --mesh.ep 8 --mesh.domain_size 8 --checkpoint.every 50 --train.hang_timeout_s 1800)
# Here: what activates the Python environment, and what your network needs (NCCL_SOCKET_IFNAME, NCCL_IB_HCA). Nothing
# else: the trainer sets XLA's flags and memory share itself.
# ----------------------------------------------------------------------------------------------------------------------
set -uo pipefail
export EP_JAX_START_TIMEOUT_S=600  # how long processes wait for each other; imports from shared storage can be slow
# JAX reads rank, number and coordinator from Slurm. Each process sees all GPUs of its box and takes the one of its
# local rank; a box's ranks are consecutive. The first to exit must not kill the others, or their code would no longer
# be 5; when one is lost, JAX ends the others itself.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --gpu-bind=none --distribution=block --kill-on-bad-exit=0 \
  python -m ep_jax.train --config "$CONFIG" --run_dir "$RUN_DIR" "${OPTIONS[@]}"
code=$?
# 5: stopped by SIGTERM and saved, as often as it happens; 8: stood still, while restarts are few (ep_jax/exits.py)
if [ "$code" -eq 5 ] || { [ "$code" -eq 8 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; }; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
