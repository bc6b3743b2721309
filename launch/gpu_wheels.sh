#!/usr/bin/env bash
# Downloads the packages that a GPU machine without network needs in addition to torch, torchvision, lightning and transformers:
#   launch/gpu_wheels.sh [FOLDER]          wheels for Linux on x86-64, by default in ./wheels
# PYTHON (3.12) is the Python version of that machine. Prints the command that installs them there, into a separate folder.
set -euo pipefail
if [ $# -gt 1 ]; then
    sed -n '2,4s/^# \?//p' "$0" >&2
    exit 2
fi
folder=${1:-wheels}
# The command line; text datasets; 8- and 4-bit optimizers; tests/gpu. Their other dependencies come with transformers.
packages=(
    'jsonargparse>=4.40,<5' 'docstring-parser>=0.17,<1' 'typeshed-client>=2.14,<3'
    'datasets>=4.0,<6' 'multiprocess<0.70.20' 'dill>=0.3,<0.4.2' 'xxhash>=3.5'
    'torchao>=0.18,<0.19'
    'pytest>=8,<10' 'pluggy>=1.5,<2' 'iniconfig>=2,<3' 'hypothesis>=6.100,<7' 'sortedcontainers>=2.4,<3' 'pygments>=2.17,<3'
)
# pip matches platforms literally: a wheel for an older glibc has another platform.
platforms=()
for tag in manylinux_2_{34,31,28,27,24,17,12,5} manylinux2014 manylinux2010 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
done
python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "${PYTHON:-3.12}" \
    "${platforms[@]}" --dest "$folder" "${packages[@]}"
du -sh "$folder" >&2
echo "python3 -m pip install --no-index --no-deps --target /tmp/site $folder/*.whl && export PYTHONPATH=/tmp/site"
