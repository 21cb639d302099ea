#!/usr/bin/env bash
# Checks the device path on a machine with a GPU, in a checkout whose folder .gpu `make gpu-check` has filled. It fetches
# nothing. The arguments are those of `python -m benchmarks.gpu`.
set -euo pipefail
cd "$(dirname "$0")/../.."
python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target .gpu/site .gpu/wheels/*.whl
export PYTHONPATH="$PWD:$PWD/.gpu/site" TRITON_CACHE_DIR="$PWD/.gpu/triton" PYTHONUNBUFFERED=1
exec python3 -m benchmarks.gpu "$@"
