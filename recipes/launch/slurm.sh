#!/bin/bash
# SLURM, any number of nodes:
#   sbatch --nodes 2 --gpus-per-node 8 --ntasks-per-node 8 recipes/launch/slurm.sh mine.yaml [section.key=value …]
# One task per GPU, started by srun itself, so that every rank gets SLURM's signals: two minutes before its time is up the
# run ends with a checkpoint, is put into the queue again, and goes on where it was, on as many nodes as it gets then.
#SBATCH --job-name=dualenc
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

set -u
if [ $# -eq 0 ]; then
    echo "which recipe? sbatch slurm.sh RECIPE.yaml [section.key=value ...]" >&2
    exit 2
fi

# Where ranks meet; the names are those that torch and accelerate read.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

# --resume begins at the first step where there is no checkpoint. A rank that fails takes the others with it.
srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    exec python -m dualenc train "$@" --resume
' dualenc "$@"
status=$?

# 138 = 128 + USR1: there is a checkpoint, and more to do.
if [ "$status" -eq 138 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
