#!/usr/bin/env bash
# Compile the CUDA files that select kernels by architecture to PTX, for the compute capabilities that
# `make cuda-build` does not compile in full. Needs nvcc, no GPU. Exit status 1 if a file does not compile.
#
#   scripts/check_cuda_ptx.sh [ARCHITECTURE...]     default: 89 100 120
set -eu
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- 89 100 120
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for architecture in "$@"; do
  for file in decoder_layer linear attention moe lora; do
    echo "$architecture $file"
  done
done | xargs -P "${JOBS:-$(nproc)}" -L 1 sh -c 'nvcc --ptx -std=c++17 -O1 -DNDEBUG -DLLAISYS_HAVE_CUDA -Iinclude \
  -Isrc -arch="compute_$1" "src/ops/$2/cuda.cu" -o "$0/$2-$1.ptx" && echo "compute capability $1: ops/$2"' "$folder"
