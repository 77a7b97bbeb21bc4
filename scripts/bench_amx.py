#!/usr/bin/env python3
"""Benchmarks of check_amx.sh in one process, with AMX or without (LLAISYS_CPU_AMX); prints a line
per result.

    bench_amx.py products           8960 x 1536 in several formats and at several numbers of rows
    bench_amx.py model WEIGHTS N    the 1.5B shape with N threads; WEIGHTS: bf16, int8 or int4
"""

from __future__ import annotations

import os
import sys

from llaisys.bench import ops, target
from llaisys.bench.latency import run_latency
from llaisys.bench.machine import describe_machine, measure
from llaisys.engine.config import EngineConfig

SHAPE = (8960, 1536)
DTYPES = ("bf16", "q8_0", "q4_0", "q4_k", "q6_k")
ROWS = (1, 16, 32, 48, 64, 128, 512)
COLD_BYTES = 640 << 20
AMX = os.environ.get("LLAISYS_CPU_AMX", "on")


def products() -> None:
    target.PASSES, target.MIN_SECONDS = 3, 0.02
    ops.cold_bytes = lambda: COLD_BYTES
    with target.open_target("cpu", 0) as cpu:
        machine = measure(cpu)
        print(describe_machine(machine))
        for dtype in DTYPES:
            for timing in ops.time_linear(cpu, SHAPE, dtype, ROWS):
                print(
                    f"AMX {AMX:3s} {dtype:5s} {timing.rows:4d} rows {timing.seconds * 1e6:8.1f} us"
                    f" {timing.n_bytes / timing.seconds / 1e9:6.1f} GB/s"
                    f" {timing.operations / timing.seconds / 1e9:8.1f} GOP/s"
                    f" {100 * timing.against(machine)['fraction']:3.0f} % of the floor",
                    flush=True,
                )


def model(weights: str, threads: int) -> None:
    """Fewer tokens with few threads, so that all thread counts take about as long."""
    result = run_latency(
        EngineConfig(n_threads=threads, quantization=None if weights == "bf16" else weights),
        shape="qwen2.5-1.5b",
        new_tokens=32 if threads >= 8 else 8,
        repeats=4 if threads >= 8 else 1,
    )
    print(
        f"AMX {AMX:3s} 1.5B {weights} {threads:2d} threads: load {result['load_s']:.2f} s,"
        f" prefill {result['prefill_tok_s']:.1f} tok/s, decode {result['decode_tok_s']:.2f} tok/s,"
        f" {100 * result['bandwidth_fraction']:.1f} % of the bandwidth",
        flush=True,
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["products"]:
        products()
    elif len(sys.argv) == 4 and sys.argv[1] == "model":
        model(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(__doc__)
