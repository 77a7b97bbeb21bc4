#!/usr/bin/env bash
# check_amx.sh: AMX tests and benchmarks in one run (about two minutes with 16 threads): builds the library and the
# C++ tests of matrix products, runs them with and without AMX, then times products and the 1.5B shape (bf16 with 1
# to all threads, int8 and int4 with half of them and all).
# Needs a CPU with AMX, cmake, ninja (or make), a C++ compiler, python3 with numpy. PREBUILT=1: use build/amx-native.
set -euo pipefail
cd "$(dirname "$0")/.."
threads=$(nproc)
step() { echo "@@ $SECONDS s: $*"; }
step "$(grep -o -w 'amx_[a-z0-9]*' /proc/cpuinfo | sort -u | tr '\n' ' '), $threads threads, $(uname -r)"
native=build/amx-native
tests=(test_tiles test_ops test_ops_attention test_ops_kv8 test_ops_linear test_ops_quant test_ops_variants
  test_packed_weights test_decoder test_runner test_parallel_linear)
if [ -z "${PREBUILT:-}" ]; then
  step build
  mkdir -p "$native"
  cmake -S . -B "$native" -DCMAKE_BUILD_TYPE=Release -DLLAISYS_BUILD_TESTS=ON -DLLAISYS_CUDA=OFF >"$native/cmake.log"
  cmake --build "$native" -j "$threads" --target llaisys cpp_tests >"$native/build.log"
fi
export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH} LLAISYS_LIBRARY=$PWD/$native/libllaisys.so
time_it() { LLAISYS_CPU_AMX=$1 python3 scripts/bench_amx.py "${@:2}"; }
step tests
for amx in on off; do
  for test in "${tests[@]}"; do
    LLAISYS_CPU_AMX=$amx "$native/test/cpp/cpp_tests" "$test/" >"$native/test.log" 2>&1 ||
      { tail -40 "$native/test.log"; echo "$test with AMX $amx: failed"; exit 1; }
  done
  step "tests with AMX $amx: pass"
done
for weights in bf16 int8 int4; do
  step "1.5B in $weights"
  time_it on model $weights "$threads"
  time_it off model $weights "$threads"
done
step products
time_it on products
time_it off products
step "fewer threads"
for ((n = threads / 2; n >= 1; n /= 2)); do
  time_it on model bf16 $n
done
for weights in int8 int4; do
  time_it on model $weights $((threads / 2))
done
step end
