#!/usr/bin/env bash
# Check and time the CUDA kernels on a GPU, one program of test/cuda/native per kernel: against a naive
# reference (PASS and FAIL lines), then as a percentage of the DRAM or tensor core bound.
#
#   scripts/check_kernels.sh [BUILD_DIR] [STAGE...]     default: build/gpu check time
#
# Stages: check, time, tune (pipeline sizes), sanitize (memcheck and synccheck), profile (ncu), tests
# (test/cuda), engine (one sequence, 256 prompts and a prefill of 4,000 tokens on two shapes, with and
# without asynchronous scheduling). Builds for the architecture 90a first unless PREBUILT is set. All
# stages run; exit status 1 if any failed.
set -u
cd "$(dirname "$0")/.."
build=${1:-build/gpu}
shift || true
[ $# -gt 0 ] || set -- check time
failed=0

python=${PYTHON:-python3}
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
mkdir -p "$(dirname "$build")"
if [ -n "${PREBUILT:-}" ]; then
  echo "as built: $build"
elif ! { cmake -S . -B "$build" -G Ninja -DLLAISYS_CUDA=ON -DLLAISYS_BUILD_TESTS=OFF \
  -DLLAISYS_CUDA_CHECKS=ON -DLLAISYS_CUDA_ARCHITECTURES=90a -DCMAKE_BUILD_TYPE=Release &&
  cmake --build "$build"; } > "$build.log" 2>&1; then
  tail -n 40 "$build.log"
  echo "FAIL build"
  exit 1
fi
mkdir -p python/llaisys/lib
ln -sf "$(realpath "$build")"/libllaisys*.so python/llaisys/lib/
names=(gemv_sm90 gemm_small_m_bulk gemm_tma_splitk gemm_tma_m96 gemm_swiglu_sm90 gemm_small_m_sm80
  attention_decode attention_prefill rope_kv_store sample_rows peer)
programs=("${names[@]/#/$build/check_}")
step="$build"/check_decode_step

run() { # seconds, command...
  local limit=$1 status=0
  shift
  echo "== $*"
  timeout --kill-after=5 "$limit" "$@" || status=$?
  if [ "$status" -ne 0 ]; then
    echo "FAIL $* (status $status)"
    failed=1
  fi
}

for stage in "$@"; do
  case $stage in
    check | time)
      # References are computed on the CPU, so checks run in parallel; timing runs are sequential.
      for program in "${programs[@]}"; do
        report=$build.$(basename "$program").$stage
        run 150 "$program" "$stage" > "$report" 2>&1 &
        [ "$stage" = check ] || wait
      done
      wait
      for program in "${programs[@]}"; do
        # PASS lines are counted; everything else is printed.
        report=$build.$(basename "$program").$stage
        echo "$program $stage: $(grep -c '^PASS' "$report") passed"
        grep -v '^PASS' "$report"
        ! grep -q '^FAIL' "$report" || failed=1
      done
      if [ "$stage" = time ]; then
        run 120 "$step" time
        run 60 "$step" many
        run 60 "$build"/check_attention_decode long
        run 60 "$build"/check_cublaslt time
      fi
      ;;
    tune)
      run 150 "$build"/check_gemm_small_m_bulk tune
      run 150 "$step" tune
      run 60 "$step" tune_many
      ;;
    sanitize)
      for tool in memcheck synccheck; do
        for program in "${programs[@]}"; do
          run 200 compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 5 "$program" small
        done
      done
      ;;
    profile)
      # Registers, shared memory, bandwidth, tensor pipe utilization and warp stall reasons.
      sections=(--section SpeedOfLight --section LaunchStats --section WarpStateStats
        --section MemoryWorkloadAnalysis)
      run 120 ncu --clock-control none --kernel-name regex:gemm_small_m_bulk_kernel --launch-count 6 \
        "${sections[@]}" "$build"/check_gemm_small_m_bulk profile
      run 120 ncu --clock-control none --kernel-name regex:attention_wgmma_kernel --launch-count 2 \
        "${sections[@]}" "$build"/check_attention_prefill profile
      run 120 ncu --clock-control none --kernel-name regex:attention_decode_kernel --launch-count 2 \
        "${sections[@]}" "$build"/check_attention_decode profile
      ;;
    tests) run 400 "$python" -m pytest -q --no-header -p no:cacheprovider test/cuda ;;
    engine)
      for shape in qwen2.5-1.5b qwen2.5-7b; do
        for stepping in on off; do
          run 240 "$python" scripts/bench_compare_vllm.py --engine ours --shape "$shape" \
            --async-scheduling "$stepping"
        done
      done
      ;;
    *)
      echo "no stage '$stage': check, time, tune, sanitize, profile, tests, engine"
      exit 2
      ;;
  esac
done
exit "$failed"
