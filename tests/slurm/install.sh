#!/usr/bin/env bash
# Installs what the Slurm tests start, on Debian and Ubuntu, as root. No service is started.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update
RUNLEVEL=1 apt-get install --yes --no-install-recommends slurm-wlm munge
