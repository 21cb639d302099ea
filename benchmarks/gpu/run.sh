#!/usr/bin/env bash
# Checks the device path on a machine with a GPU, in a checkout whose folder .gpu `make gpu-bundle` has filled. It fetches
# nothing. The arguments are those of `python -m benchmarks.gpu`.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ ! -f .gpu/site.tar.xz ]; then
    echo 'There is no .gpu/site.tar.xz: make gpu-bundle packs it on a machine with a network.' >&2
    exit 2
fi
rm -rf .gpu/site
# Not by tar, which needs a program for xz.
python3 -m tarfile --filter data --extract .gpu/site.tar.xz .
# What is carried comes before what the machine has: its versions are known.
export PYTHONPATH="$PWD:$PWD/lab:$PWD/.gpu/site" TRITON_CACHE_DIR="$PWD/.gpu/triton" PYTHONUNBUFFERED=1
exec python3 -m benchmarks.gpu "$@"
