#!/usr/bin/env bash
# Run everything that needs an NVIDIA GPU and print one report: build both libraries, GPU tests,
# compute-sanitizer over the operators at small shapes, benchmarks.
#
#   scripts/check_gpu.sh [BUILD_DIR]     default: build/gpu; PYTHON=python3, ARCHITECTURES=90a
#   PREBUILT=1 scripts/check_gpu.sh DIR  use an existing build
#   DRY_RUN=1 scripts/check_gpu.sh       print the stages only
#
# Needs cmake, ninja, nvcc and the imports of the package and its tests. Each stage has a time limit; the
# stages after the build share SECONDS_IN_ALL=600. A stage without its program is skipped and reported. The
# report is also written to BUILD_DIR/report.txt. Exit status 1 if a stage failed or was skipped.
set -u
cd "$(dirname "$0")/.."
build=${1:-build/gpu}
python=${PYTHON:-python3}
dry=${DRY_RUN:-}
report=()
failed=0
until= # value of $SECONDS; empty: no limit

stage() { # name, seconds, command...
  local name=$1 limit=$2 begin=$SECONDS status=0
  shift 2
  if [ -n "$until" ] && [ $((until - SECONDS)) -lt "$limit" ]; then limit=$((until - SECONDS)); fi
  echo "== $name: $*"
  if [ -n "$dry" ]; then
    report+=("not run $name")
    return
  fi
  if [ "$limit" -le 0 ]; then
    report+=("FAILED  $name: no time left")
    failed=1
    return 1
  fi
  if [[ $1 == */* ]] && [ ! -e "$1" ]; then
    report+=("FAILED  $name: $1 was not built")
    failed=1
    return 1
  fi
  timeout --kill-after=10 "$limit" "$@" || status=$?
  case $status in
    0) report+=("ok      $name ($((SECONDS - begin)) s)") ;;
    124 | 137) report+=("FAILED  $name: not done after $limit s"); failed=1 ;;
    *) report+=("FAILED  $name: status $status after $((SECONDS - begin)) s"); failed=1 ;;
  esac
  return "$status"
}

finish() {
  echo "== report"
  printf '%s\n' "${report[@]}"
  if [ -z "$dry" ]; then printf '%s\n' "${report[@]}" > "$build/report.txt"; fi
  exit "$failed"
}

run_pytest=("$python" -m pytest -q --no-header -p no:cacheprovider)
[ -n "$dry" ] || mkdir -p "$build"
if [ -n "${PREBUILT:-}" ]; then
  echo "== as built: $build"
else
  stage configure 120 cmake -S . -B "$build" -G Ninja -DLLAISYS_CUDA=ON -DLLAISYS_BUILD_TESTS=ON \
    -DLLAISYS_CUDA_CHECKS=ON -DLLAISYS_CUDA_ARCHITECTURES="${ARCHITECTURES:-90a}" \
    -DCMAKE_BUILD_TYPE=Release || finish
  stage build 1800 cmake --build "$build" || finish
fi
if [ -z "$dry" ]; then
  mkdir -p python/llaisys/lib
  ln -sf "$(realpath "$build")"/libllaisys*.so python/llaisys/lib/
fi
until=$((SECONDS + ${SECONDS_IN_ALL:-600}))
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
export PREBUILT=1 # for check_kernels.sh
stage environment 60 "$python" -m llaisys env
stage "C++ tests" 120 "$build/test/cpp/cuda_tests"
stage tests 240 "${run_pytest[@]}" test/cuda
quantised="(products_match and 768) or adjacent or kv_store or (attention_matches and bf16) or quantised_experts"
# The sanitizers slow kernels down by 100 and more: small shapes only.
for tool in memcheck synccheck racecheck; do
  stage "$tool" 90 env LLAISYS_SMALL_SHAPES=1 compute-sanitizer --tool "$tool" \
    --error-exitcode 1 --print-limit 5 "${run_pytest[@]}" test/cuda/test_cuda_ops.py
  stage "$tool of layer norm, GELU and scaling" 60 compute-sanitizer --tool "$tool" \
    --error-exitcode 1 --print-limit 5 "$build/test/cpp/cuda_tests" test_ops_variants/
  stage "$tool of sample_rows" 60 compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 5 \
    "$build/check_sample_rows" small
  stage "$tool of quantised weights and KV caches" 60 env LLAISYS_SMALL_SHAPES=1 compute-sanitizer \
    --tool "$tool" --error-exitcode 1 --print-limit 5 "${run_pytest[@]}" -k "$quantised" \
    test/cuda/test_cuda_quantised.py test/cuda/test_cuda_kv8.py test/cuda/test_cuda_moe.py
done
for shape in qwen2.5-1.5b qwen2.5-7b; do
  stage "benchmark $shape" 120 "$python" scripts/bench_compare_vllm.py --engine ours \
    --shape "$shape" --repeats 1
done
stage "70B shape" 60 "$python" scripts/bench_gpu_capacity.py
stage "memory over 10,000 steps" 60 "$python" scripts/check_steps_memory.py
stage "server against the engine alone" 60 "$python" scripts/bench_gpu_server.py
stage "evicted prefixes" 60 "$python" scripts/bench_kv_offload.py
stage kernels 120 scripts/check_kernels.sh "$build" check time
finish
