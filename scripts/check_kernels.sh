#!/usr/bin/env bash
# Checks and times the CUDA kernels one by one on a GPU machine, each in its own program of
# test/cuda/native: first against a naive twin (PASS and FAIL lines), then as a fraction of what memory or
# tensor cores allow.
#
#   scripts/check_kernels.sh [BUILD_DIR] [STAGE...]     default build/gpu and the stages check time
#
# Stages: check, time, tune (sizes of row_ring's ring), sanitize (memcheck and synccheck of the checks),
# profile (ncu: where the kernels wait), tests (test/cuda), engine (one sequence, 256 prompts and a prefill
# of 4,000 on two shapes, steps ahead and not). Builds first, for the architecture 90a, unless PREBUILT is
# set. Exit status 1 if anything failed; every stage is run all the same.
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
programs=("$build"/check_one_row "$build"/check_row_ring "$build"/check_box_ring "$build"/check_wide_ring "$build"/check_gated "$build"/check_skinny "$build"/check_decode "$build"/check_prefill "$build"/check_sample_rows)
chain="$build"/check_decode_chain

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
      # Twins are computed on the CPU, so that checks run side by side; times are taken one by one.
      for program in "${programs[@]}"; do
        report=$build.$(basename "$program").$stage
        run 150 "$program" "$stage" > "$report" 2>&1 &
        [ "$stage" = check ] || wait
      done
      wait
      for program in "${programs[@]}"; do
        # What passed is only counted; what failed, the notes and the tables are shown.
        report=$build.$(basename "$program").$stage
        echo "$program $stage: $(grep -c '^PASS' "$report") passed"
        grep -v '^PASS' "$report"
        ! grep -q '^FAIL' "$report" || failed=1
      done
      if [ "$stage" = time ]; then
        run 120 "$chain" time
        run 60 "$chain" many
        run 60 "$build"/check_products time
      fi
      ;;
    tune)
      run 150 "$build"/check_row_ring tune
      run 150 "$chain" tune
      run 60 "$chain" tune_many
      ;;
    sanitize)
      for tool in memcheck synccheck; do
        for program in "${programs[@]}"; do
          run 200 compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 5 "$program" small
        done
      done
      ;;
    profile)
      # Registers and shared memory, how much of the bandwidth or the tensor pipes, and why warps wait.
      sections=(--section SpeedOfLight --section LaunchStats --section WarpStateStats
        --section MemoryWorkloadAnalysis)
      run 120 ncu --clock-control none --kernel-name regex:row_ring_kernel --launch-count 6 \
        "${sections[@]}" "$build"/check_row_ring profile
      run 120 ncu --clock-control none --kernel-name regex:attention_wgmma_kernel --launch-count 2 \
        "${sections[@]}" "$build"/check_prefill profile
      run 120 ncu --clock-control none --kernel-name regex:attention_decode_kernel --launch-count 2 \
        "${sections[@]}" "$build"/check_decode profile
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
