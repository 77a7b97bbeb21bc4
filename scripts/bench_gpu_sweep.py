#!/usr/bin/env python3
"""Decode, prefill and long contexts of several model shapes on a GPU, against floors and vLLM.

    scripts/bench_gpu_sweep.py [--shapes qwen3-8b path/to/config.json ...]
        [--sequences 1 8 32 128 256] [--context 128] [--long 30000]
        [--kv-cache-dtypes auto fp8 q8] [--quantization fp8]
        [--engine ours|vllm|both] [--vllm-results FILE]

`scripts/bench_compare_vllm.py --sweep ...` is the same. Random bf16 weights, or the same quantized
at load, greedy sampling, prompts of --context tokens. A decode step is the difference of two runs
that generate a different number of tokens, over that number. The floor of a step is the larger of
its bytes (bf16 weights and KV cache) over --bandwidth and its products over --peak.

Prints a JSON line for each engine, shape and KV cache dtype, then one table. vLLM runs where it is
installed. Otherwise its figures are those of --vllm-results, JSON lines of an earlier run, or the
recorded ones below; the table says which.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_compare_vllm import Limits, open_engine

NEW_TOKENS = (9, 137)  # of the two runs of a difference
PREFILL = 4000
KV_BYTES = {"auto": 2.0, "bf16": 2.0, "q8": 1.0, "fp8": 1.0}  # per value, without the scales
SHAPES = (
    "qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "llama-3.1-8b",
    "qwen3-8b", "qwen2.5-14b",
)  # fmt: skip
RECORDED_AS = "recorded with vLLM 0.25.1 on an H200, CUDA graphs and compilation on"
RECORDED: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {"decode_ms": {"1": 2.41}, "prefill_ms": 26},
    "qwen2.5-7b": {"decode_ms": {"1": 4.83}, "prefill_ms": 84},
    "qwen2.5-3b": {
        "decode_ms": {"1": 2.99, "8": 3.07, "32": 3.29, "256": 6.30},
        "prefill_ms": 44.8,
        "long_tok_s": 298,
    },
    "llama-3.1-8b": {
        "decode_ms": {"1": 4.96, "8": 5.08, "32": 5.55, "256": 11.4},
        "prefill_ms": 97.7,
        "long_tok_s": 168,
    },
    "qwen3-8b": {
        "decode_ms": {"1": 5.23, "8": 5.52, "32": 5.75, "256": 11.9},
        "prefill_ms": 100,
        "long_tok_s": 158,
    },
}


class Floors:
    """Lower bounds of the time of a step of a dense model, in milliseconds."""

    def __init__(self, config: dict[str, Any], kv_dtype: str, options: argparse.Namespace) -> None:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        kv_size = config["num_key_value_heads"] * head_dim
        attention = hidden * (2 * heads * head_dim + 2 * kv_size)
        layers = config["num_hidden_layers"]
        self._layers = layers * (attention + 3 * hidden * config["intermediate_size"])
        self._head = config["vocab_size"] * hidden
        self._kv_bytes = 2 * KV_BYTES[kv_dtype] * layers * kv_size  # per token
        self._scores = 2 * layers * heads * head_dim  # multiplications per pair of tokens
        self._bandwidth, self._peak = options.bandwidth, options.peak

    def decode(self, rows: int, tokens: int) -> float:
        """A step of `rows` sequences over `tokens` positions of the KV cache in all."""
        weights = self._layers + self._head
        read = (2 * weights + self._kv_bytes * tokens) / self._bandwidth
        return 1e3 * max(read, 2 * weights * rows / self._peak)

    def prefill(self, tokens: int) -> float:
        """A prompt; half of the pairs of tokens are masked."""
        return 1e3 * (2 * self._layers * tokens + self._scores * tokens**2) / self._peak


def name_of(shape: str) -> str:
    return Path(shape).parent.name or Path(shape).stem if shape.endswith(".json") else shape


def run_shape(
    engine: str, shape: str, kv_dtype: str, options: argparse.Namespace
) -> dict[str, Any]:
    from peers.random_files import write_model_files

    from llaisys.models.synthetic import shape_config

    start = time.perf_counter()
    config, name = shape_config(shape), name_of(shape)
    model = write_model_files(shape, "bf16", options.models / f"{name}-bf16")
    chance = random.Random(0)
    floors = Floors(config, kv_dtype, options)
    result: dict[str, Any] = {"engine": engine, "shape": name, "kv": kv_dtype}
    limits = Limits(options.long + 512 if options.long else 8192, max(*options.sequences, 1))
    more: dict[str, Any] = {"kv_cache_dtype": kv_dtype}
    if engine == "ours":
        more["quantization"] = options.quantization
    with open_engine(engine, model, limits, **more) as generate:

        def seconds(n: int, length: int, new_tokens: int) -> float:
            vocabulary = config["vocab_size"] - 1000
            prompts = [[chance.randrange(vocabulary) for _ in range(length)] for _ in range(n)]
            begin = time.perf_counter()
            generate([(prompt, new_tokens) for prompt in prompts])
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
        result["decode_ms"], result["floor_ms"] = {}, {}
        for n in options.sequences:
            result["decode_ms"][n] = step_ms(n, options.context, options.repeats)
            result["floor_ms"][n] = round(floors.decode(n, n * (options.context + generated)), 3)
        result["prefill_ms"] = round(
            1e3 * statistics.median(seconds(1, PREFILL, 1) for _ in range(3)), 2
        )
        result["prefill_floor_ms"] = round(floors.prefill(PREFILL), 2)
        if options.long:
            result["long_tok_s"] = round(1e3 / step_ms(1, options.long, 1), 1)
            result["long_floor_tok_s"] = round(1e3 / floors.decode(1, options.long), 1)
            result["long_prefill_ms"] = round(1e3 * seconds(1, options.long, 1), 1)
            result["long_prefill_floor_ms"] = round(floors.prefill(options.long), 1)
    return result


def cell(ours: float, share: float, theirs: float | None, faster: float | None) -> str:
    """Ours with its percent of the floor, and vLLM's with the speedup over it."""
    text = f"{ours:.4g} ({100 * share:.0f}%)"
    return text if theirs is None else f"{text} / {theirs:.4g} {faster:.2f}x"


def print_table(
    results: list[dict[str, Any]], vllm: dict[str, dict[str, Any]], source: str,
    options: argparse.Namespace,
) -> None:  # fmt: skip
    print("\nms of a decode step by sequences, ms of a prompt, tok/s of one long sequence: ours "
          f"(percent of the floor) / vLLM, speedup\nvLLM: {source}")  # fmt: skip
    header = ["shape", "kv", *(f"{n} seq" for n in options.sequences), f"prompt {PREFILL:,}"]
    if options.long:
        header += [f"at {options.long:,}, tok/s", f"prompt {options.long:,}"]
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    for r in results:
        known = vllm.get(r["shape"], {}) if r["kv"] == "auto" else {}
        cells = [r["shape"], r["kv"]]

        def time_cell(
            ms: float, floor: float, theirs: float | None, cells: list[str] = cells
        ) -> None:
            cells.append(cell(ms, floor / ms, theirs, None if theirs is None else theirs / ms))

        for n in (str(n) for n in options.sequences):
            time_cell(r["decode_ms"][n], r["floor_ms"][n], known.get("decode_ms", {}).get(n))
        time_cell(r["prefill_ms"], r["prefill_floor_ms"], known.get("prefill_ms"))
        if options.long:
            speed, theirs = r["long_tok_s"], known.get("long_tok_s")
            faster = None if theirs is None else speed / theirs
            cells.append(cell(speed, speed / r["long_floor_tok_s"], theirs, faster))
            floor = r["long_prefill_floor_ms"]
            time_cell(r["long_prefill_ms"], floor, known.get("long_prefill_ms"))
        print("| " + " | ".join(cells) + " |", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="names or config.json")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--context", type=int, default=128, help="prompt tokens of a sequence")
    parser.add_argument("--kv-cache-dtypes", nargs="+", default=["auto"], choices=list(KV_BYTES))
    parser.add_argument("--long", type=int, default=30000, help="context; 0: none")
    parser.add_argument("--quantization", choices=("int8", "int4", "fp8"))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--bandwidth", type=float, default=4.39e12, help="bytes per second")
    parser.add_argument("--peak", type=float, default=793e12, help="bf16 FLOP per second")
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/llaisys-models"))
    parser.add_argument("--engine", choices=("ours", "vllm", "both"), default="both")
    parser.add_argument("--vllm-results", type=Path, help="JSON lines of an earlier run")
    # Engine, shape and KV dtype of a subprocess.
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    if options.one:
        engine, shape, kv = options.one
        print(json.dumps(run_shape(engine, shape, kv, options)), flush=True)
        return 0
    has_vllm = importlib.util.find_spec("vllm") is not None
    engines = ["ours"] if options.engine != "vllm" else []
    if has_vllm and options.engine != "ours":
        engines.append("vllm")
    results: dict[str, list[dict[str, Any]]] = {"ours": [], "vllm": []}
    status = 0
    # One process each: the memory of a model is freed.
    for shape, kv, engine in itertools.product(options.shapes, options.kv_cache_dtypes, engines):
        ended = subprocess.run(
            [sys.executable, __file__, *given, "--one", engine, shape, kv],
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        print(ended.stdout, end="", flush=True)
        if ended.returncode != 0:
            status = 1
            continue
        results[engine].append(json.loads(ended.stdout.splitlines()[-1]))
    known, source = RECORDED, RECORDED_AS
    if "vllm" in engines:
        known, source = {r["shape"]: r for r in results["vllm"]}, "measured"
    elif options.vllm_results is not None:
        lines = [json.loads(row) for row in options.vllm_results.read_text().splitlines()]
        known = {r["shape"]: r for r in lines if r["engine"] == "vllm"}
        source = f"from {options.vllm_results.name}"
    print_table(results["ours"], known, source, options)
    return status


if __name__ == "__main__":
    sys.exit(main())
