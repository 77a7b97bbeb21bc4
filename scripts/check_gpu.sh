#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one command with one report: builds both libraries, runs the
# GPU tests, compute-sanitizer over the operators, and the benchmark.
#
#   scripts/check_gpu.sh [BUILD_DIR]     default build/gpu; PYTHON=python3, ARCHITECTURES=90a
#
# Needs cmake, ninja, nvcc and what the package and its tests import. Exit status 1 if anything failed.
set -u
cd "$(dirname "$0")/.."
build=${1:-build/gpu}
python=${PYTHON:-python3}
report=()
failed=0

stage() { # name, command...
  local name=$1
  shift
  echo "== $name"
  if "$@"; then report+=("ok      $name"); else report+=("FAILED  $name"); failed=1; fi
}
pytest() { "$python" -m pytest -q --no-header -p no:cacheprovider "$@"; }
sanitize() { # tool: the operators at their smaller sizes
  compute-sanitizer --tool "$1" --error-exitcode 1 --print-limit 5 \
    "$python" -m pytest -q --no-header -p no:cacheprovider test/cuda/test_cuda_ops.py \
    -k "not bf16 or linear"
}

stage configure cmake -S . -B "$build" -G Ninja -DLLAISYS_CUDA=ON -DLLAISYS_BUILD_TESTS=OFF \
  -DLLAISYS_CUDA_ARCHITECTURES="${ARCHITECTURES:-90a}" -DCMAKE_BUILD_TYPE=Release
stage build cmake --build "$build"
mkdir -p python/llaisys/lib
ln -sf "$(realpath "$build")"/libllaisys*.so python/llaisys/lib/
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
stage environment "$python" -m llaisys env
stage tests pytest test/cuda
for tool in memcheck racecheck synccheck; do
  stage "$tool" sanitize "$tool"
done
for shape in qwen2.5-1.5b qwen2.5-7b; do
  stage "benchmark $shape" "$python" scripts/bench_compare_vllm.py --shape "$shape"
done

echo "== report"
printf '%s\n' "${report[@]}"
exit "$failed"
