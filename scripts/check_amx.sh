#!/usr/bin/env bash
# check_amx.sh [OUT]: everything about AMX tiles in one run, on a machine that has them: builds library and C++
# tests, runs the tests of products, then times products and a prompt with tiles and without and prints the
# ratios. Results in OUT (default build/amx). Needs cmake, ninja (or make), a C++ compiler, python3 with numpy.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/amx}
mkdir -p "$out"
grep -o -w 'amx_[a-z0-9]*' /proc/cpuinfo | sort -u | tr '\n' ' '
echo "$(nproc) threads, $(uname -r)"
cmake -S . -B build/amx-native -DCMAKE_BUILD_TYPE=Release -DLLAISYS_BUILD_TESTS=ON -DLLAISYS_CUDA=OFF >"$out/cmake.log"
cmake --build build/amx-native -j "$(nproc)" >"$out/build.log"
for amx in on off; do
  LLAISYS_CPU_AMX=$amx ctest --test-dir build/amx-native -R 'test_(tiles|ops|packed|decoder|runner|parallel_linear)' \
    --output-on-failure >"$out/ctest.$amx.log" && echo "tests with AMX $amx: pass" || { tail -40 "$out/ctest.$amx.log"; exit 1; }
done
export PYTHONPATH=$PWD/python LLAISYS_LIBRARY=$PWD/build/amx-native/libllaisys.so
bench() { # name, arguments
  local name=$1
  shift
  for amx in on off; do
    LLAISYS_CPU_AMX=$amx python3 -m llaisys bench "$@" --json >"$out/$name.$amx.json"
  done
}
bench ops ops --model qwen2.5-0.5b --dtype bf16 --dtype q8_0 --dtype q4_0 --dtype q4_k --dtype q6_k
bench latency.bf16 latency --shape qwen2.5-1.5b
bench latency.int8 latency --shape qwen2.5-1.5b --quantization int8
bench latency.int4 latency --shape qwen2.5-1.5b --quantization int4
python3 - "$out" <<'P'
import json, sys

out = sys.argv[1]
def read(name):
    return [json.load(open(f"{out}/{name}.{amx}.json")) for amx in ("on", "off")]

on, off = read("ops")
before = {(r["op"], r["dtype"], r["shape"], r["rows"]): r for r in off["results"]}
print(f"{'product':28s} {'rows':>5s} {'AMX':>9s} {'without':>9s} {'ratio':>6s}")
for r in on["results"]:
    if r["op"] == "linear":
        b = before[r["op"], r["dtype"], r["shape"], r["rows"]]
        print(f"{r['dtype'] + ' ' + r['shape']:28s} {r['rows']:5d} {r['value']:9.1f} {b['value']:9.1f} "
              f"{r['value'] / b['value']:6.2f} {r['unit']}")
for name in ("bf16", "int8", "int4"):
    on, off = read(f"latency.{name}")
    for key in ("load_s", "prefill_tok_s", "decode_tok_s", "bandwidth_fraction"):
        print(f"1.5B {name:5s} {key:20s} {on[key]:10.2f} {off[key]:10.2f} {on[key] / off[key]:6.2f}")
P
