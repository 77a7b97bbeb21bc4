#!/usr/bin/env python3
"""Time decode steps, a prefill and a long context on a GPU for several model shapes.

    scripts/bench_gpu_sweep.py [--shapes qwen3-8b ...] [--sequences 1 8 32 256] [--long 30000]
        [--context 128] [--kv-cache-dtypes auto fp8 q8] [--quantization fp8]

Random bf16 weights, or the same quantized at load, greedy sampling, prompts of --context tokens. A
decode step is the difference of two runs that generate a different number of tokens, over that
number. The floor is the time to read the bf16 weights and the KV cache of a step at --bandwidth
bytes per second. Prints a JSON line for each shape and KV cache dtype and a table at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NEW_TOKENS = (9, 137)  # of the two runs of a difference
PREFILL = 4000
KV_BYTES = {"auto": 2.0, "bf16": 2.0, "q8": 1.0, "fp8": 1.0}  # per value, without the scales
SHAPES = ("qwen3-8b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-1.5b", "llama-3.1-8b")


def floor_ms(config: dict[str, Any], tokens: int, kv_bytes: float, bandwidth: float) -> float:
    """Milliseconds to read the weights once and the keys and values of `tokens` positions."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    kv_size = config["num_key_value_heads"] * head_dim
    layer = hidden * (2 * heads * head_dim + 2 * kv_size) + 3 * hidden * config["intermediate_size"]
    layers = config["num_hidden_layers"]
    weights = 2 * (layers * layer + config["vocab_size"] * hidden)
    return 1e3 * (weights + 2 * kv_bytes * layers * kv_size * tokens) / bandwidth


def run_shape(shape: str, kv_dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    from llaisys import LLM, SamplingParams
    from llaisys.models.synthetic import SHAPES as CONFIGS
    from llaisys.models.synthetic import write_shape_model

    start = time.perf_counter()
    model = write_shape_model(shape, "bf16", options.models / f"{shape}-bf16")
    chance = random.Random(0)
    vocabulary = CONFIGS[shape]["vocab_size"] - 1000
    result: dict[str, Any] = {"shape": shape, "kv": kv_dtype, "decode_ms": {}, "floor_ms": {}}

    def floor(tokens: int) -> float:
        return floor_ms(CONFIGS[shape], tokens, KV_BYTES[kv_dtype], options.bandwidth)

    with LLM(
        str(model),
        device="cuda",
        quantization=options.quantization,
        max_model_len=options.long + 512 if options.long else 8192,
        max_num_seqs=max(*options.sequences, 1),
        max_num_batched_tokens=16384,
        enable_prefix_caching=False,
        kv_cache_dtype=kv_dtype,
    ) as llm:

        def seconds(n: int, length: int, new_tokens: int) -> float:
            prompts = [[chance.randrange(vocabulary) for _ in range(length)] for _ in range(n)]
            params = SamplingParams(
                max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False
            )
            begin = time.perf_counter()
            llm.generate(prompts, [params] * n)
            return time.perf_counter() - begin

        def step_ms(n: int, length: int, repeats: int) -> float:
            seconds(n, length, NEW_TOKENS[0])  # captures the graph
            few, many = NEW_TOKENS
            runs = [
                (seconds(n, length, many) - seconds(n, length, few)) / (many - few)
                for _ in range(repeats)
            ]
            return round(1e3 * statistics.median(runs), 3)

        seconds(1, 16, 1)
        result["start_s"] = round(time.perf_counter() - start, 1)
        generated = sum(NEW_TOKENS) // 2
        for n in options.sequences:
            result["decode_ms"][n] = step_ms(n, options.context, options.repeats)
            result["floor_ms"][n] = round(floor(n * (options.context + generated)), 3)
        result["prefill_ms"] = round(
            1e3 * statistics.median(seconds(1, PREFILL, 1) for _ in range(3)), 2
        )
        if options.long:
            ms = step_ms(1, options.long, 1)
            result["long_tok_s"] = round(1e3 / ms, 1)
            result["long_floor_tok_s"] = round(1e3 / floor(options.long), 1)
            result["long_prefill_ms"] = round(1e3 * seconds(1, options.long, 1), 1)
    return result


def print_table(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    names = [f"{n} seq" for n in options.sequences]
    header = f"{'shape':14}{'kv':5}" + "".join(f"{name:>16}" for name in names)
    print(header + "   prefill    long tok/s  long prefill")
    for r in results:
        cells = []
        for n in (str(n) for n in options.sequences):
            ms, floor = r["decode_ms"][n], r["floor_ms"][n]
            cells.append(f"{ms:9.2f} ({100 * floor / ms:3.0f}%)")
        line = f"{r['shape']:14}{r['kv']:5}" + "".join(f"{cell:>16}" for cell in cells)
        line += f"{r['prefill_ms']:10.1f}"
        if "long_tok_s" in r:
            share = 100 * r["long_tok_s"] / r["long_floor_tok_s"]
            line += f"{r['long_tok_s']:10.0f} ({share:.0f}%){r['long_prefill_ms']:12.0f}"
        print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8, 32, 256])
    parser.add_argument("--context", type=int, default=128, help="prompt tokens of a sequence")
    parser.add_argument("--kv-cache-dtypes", nargs="+", default=["auto"], choices=list(KV_BYTES))
    parser.add_argument("--long", type=int, default=30000, help="context; 0: none")
    parser.add_argument("--quantization", choices=("int8", "int4", "fp8"))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--bandwidth", type=float, default=4.39e12, help="bytes per second")
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/llaisys-models"))
    # Shape and KV dtype of a subprocess.
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        shape, kv_dtype = options.one
        print(json.dumps(run_shape(shape, kv_dtype, options)), flush=True)
        return 0
    results, status = [], 0
    # One process each: the memory of a model is freed.
    for shape, kv_dtype in itertools.product(options.shapes, options.kv_cache_dtypes):
        ended = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--one", shape, kv_dtype],
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        print(ended.stdout, end="", flush=True)
        if ended.returncode != 0:
            status = 1
            continue
        results.append(json.loads(ended.stdout.splitlines()[-1]))
    print_table(results, options)
    return status


if __name__ == "__main__":
    sys.exit(main())
