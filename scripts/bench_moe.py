#!/usr/bin/env python3
"""Time decode steps and a prefill of a mixture of experts on a GPU.

    scripts/bench_moe.py [--shape qwen3-30b-a3b] [--layers 2 8] [--sequences 1 8 32 256]

Random bf16 weights made on the GPU, or the same quantized by --quantization. Models with two
numbers of layers are timed; the time of the whole shape is that of the smaller one plus the
difference per layer for the layers that are missing. A decode step is the difference of two runs
that generate a different number of tokens, over that number. Tokens are sampled at temperature 1,
so that sequences select different experts. Prints one JSON line per model and a table.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

CONTEXT = 128
NEW_TOKENS = (9, 73)  # of the two runs of a difference
PREFILL = 4000


def run_model(layers: int, options: argparse.Namespace) -> dict[str, float]:
    from llaisys import LLM, SamplingParams
    from llaisys.models.synthetic import SHAPES, write_shape_model

    folder = options.models / f"{options.shape}-{layers}-layers"
    model = write_shape_model(options.shape, "bf16", folder, layers)
    chance = random.Random(0)
    vocabulary = SHAPES[options.shape]["vocab_size"] - 1000
    result: dict[str, float] = {}
    with LLM(
        str(model),
        device="cuda",
        quantization=options.quantization,
        max_model_len=8192,
        max_num_seqs=max(options.sequences),
        max_num_batched_tokens=16384,
        enable_prefix_caching=False,
    ) as llm:

        def seconds(n: int, length: int, new_tokens: int) -> float:
            prompts = [[chance.randrange(vocabulary) for _ in range(length)] for _ in range(n)]
            params = [
                SamplingParams(
                    max_tokens=new_tokens,
                    temperature=options.temperature,
                    seed=i,
                    ignore_eos=True,
                    detokenize=False,
                )
                for i in range(n)
            ]
            begin = time.perf_counter()
            llm.generate(prompts, params)
            return time.perf_counter() - begin

        few, many = NEW_TOKENS
        for n in options.sequences:
            seconds(n, CONTEXT, few)  # captures the graph
            runs = [
                (seconds(n, CONTEXT, many) - seconds(n, CONTEXT, few)) / (many - few)
                for _ in range(options.repeats)
            ]
            result[f"decode {n}"] = 1e3 * statistics.median(runs)
        seconds(1, PREFILL, 1)
        result[f"prefill {PREFILL}"] = 1e3 * statistics.median(
            seconds(1, PREFILL, 1) for _ in range(3)
        )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 8))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--quantization", choices=("int8", "int4", "fp8"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--models", type=Path, default=Path("/tmp/llaisys-random"))
    options = parser.parse_args()
    from llaisys.models.synthetic import SHAPES

    whole = SHAPES[options.shape]["num_hidden_layers"]
    found: list[dict[str, Any]] = []
    for layers in options.layers:
        found.append(run_model(layers, options))
        print(json.dumps({"layers": layers, "ms": found[-1]}), flush=True)
    low, high = options.layers
    print(f"| {options.shape} | per layer, us | {whole} layers, ms |")
    for name, first in found[0].items():
        slope = (found[1][name] - first) / (high - low)
        print(f"| {name} | {1e3 * slope:.1f} | {first + slope * (whole - low):.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
