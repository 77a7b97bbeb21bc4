#!/usr/bin/env bash
# Compile the CUDA files that select kernels by architecture to PTX, for the compute capabilities that
# `make cuda-build` does not compile in full, and the programs of test/cuda/native, which it leaves out,
# for 90a. Needs nvcc, no GPU. Exit status 1 if a file does not compile.
#
#   scripts/check_cuda_ptx.sh [ARCHITECTURE...]     default: 89 100 120
set -eu
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- 89 100 120
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
{
  for architecture in "$@"; do
    for file in decoder_layer linear attention moe lora; do
      echo "$architecture src/ops/$file/cuda.cu"
    done
  done
  for file in test/cuda/native/check_*.cu; do
    echo "90a $file"
  done
} | xargs -P "${JOBS:-$(nproc)}" -L 1 sh -c 'nvcc --ptx -std=c++17 -O1 -DNDEBUG -DLLAISYS_HAVE_CUDA \
  -DLLAISYS_HAVE_SM90A -Iinclude -Isrc -Itest/cuda/native -diag-suppress 20050,1886 -arch="compute_$1" "$2" \
  -o "$0/$(echo "$2" | tr / -)-$1.ptx" && echo "compute capability $1: $2"' "$folder"
