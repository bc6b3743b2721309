#!/usr/bin/env bash
# Trains a recipe on several processes of this machine: launch/torchrun.sh 4 vit_digits --batch_size 128
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: $0 PROCESSES RECIPE [flags of trainer fit]" >&2
    exit 2
fi
processes=$1
shift
# Without this, torchrun's processes run single-threaded on a CPU and say so at length; on GPUs it does not matter.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Not -m trainer, which would import whatever lies in the working directory first.
export PYTHONUNBUFFERED=1
exec torchrun --standalone --nproc-per-node "$processes" --no-python trainer fit "$@"
