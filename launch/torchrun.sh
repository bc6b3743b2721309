#!/usr/bin/env bash
# Trains a recipe on several processes of this machine: launch/torchrun.sh 4 vit_digits --batch_size 128
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: $0 PROCESSES RECIPE [flags of trainer fit]" >&2
    exit 2
fi
processes=$1
shift
# Without this, torchrun's processes run single-threaded on a CPU and print a long warning; on GPUs it does not matter.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Torchrun's stores listen on all interfaces, without a password. So torchrun's own store is an unlinked file, and the
# first rank hosts the ranks' store on loopback.
rendezvous=$(mktemp)
exec 9<>"$rendezvous"
rm -f "$rendezvous"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TRAINER_LAUNCHER=$$ # ranks end when this process ends
# Not -m trainer, which would first import modules from the working directory.
export PYTHONUNBUFFERED=1
exec torchrun --nproc-per-node "$processes" --local-addr 127.0.0.1 --rdzv-id "$HOSTNAME-$$-$RANDOM$RANDOM" \
    --rdzv-backend c10d --rdzv-endpoint /dev/fd/9 --rdzv-conf store_type=file,keep_alive_interval=600 \
    --no-python trainer fit "$@"
