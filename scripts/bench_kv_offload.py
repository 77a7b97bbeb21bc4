#!/usr/bin/env python3
"""Time to first token of an evicted prefix: recomputed, or loaded from host blocks.

    scripts/bench_kv_offload.py [--device cuda] [--shape qwen2.5-1.5b] [--prefix 8000] [--repeats 5]

Random weights. The KV cache fits little more than one such prompt, so that a second prompt evicts
the first; then the first is submitted again and one token is sampled. Measures the time to that
token without `kv_offload`, with it, and with the prefix still cached. Prints one JSON line:
milliseconds (medians), copied bytes and their rate. Exit status 1 when the tokens differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from llaisys import LLM, SamplingParams
from llaisys.models.synthetic import write_shape_model

BLOCK = 16


def prompts(length: int, vocabulary: int) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(0)
    first, second = rng.integers(10, vocabulary, (2, length)).tolist()
    return first, second


def ask(llm: LLM, prompt: list[int]) -> tuple[float, int, int, int]:
    """(seconds, token, cached tokens, tokens loaded from host blocks)"""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    output = llm.generate(prompt, params)[0]
    seconds = time.perf_counter() - start
    usage = output.usage
    return seconds, output.token_ids[0], usage.cached_tokens, usage.host_cached_tokens


def measure(model: str, options: argparse.Namespace, offload: int) -> dict[str, Any]:
    blocks = options.prefix // BLOCK + 2
    with LLM(
        model, device=options.device, dtype=options.dtype, num_kv_blocks=blocks, block_size=BLOCK,
        max_model_len=options.prefix + 2 * BLOCK, max_num_batched_tokens=options.batched_tokens,
        max_num_seqs=8, kv_offload=offload,
    ) as llm:  # fmt: skip
        first, second = prompts(options.prefix, llm.model_info.vocab_size)
        ask(llm, first)
        again, kept, tokens = [], [], set()
        for _ in range(options.repeats):
            ask(llm, second)
            seconds, token, cached, from_host = ask(llm, first)
            again.append(seconds)
            kept.append(ask(llm, first)[0])
            tokens.add(token)
        found = from_host if offload else cached
        expected = (options.prefix - 1) // BLOCK * BLOCK if offload else 0
        if abs(found - expected) > 8 * BLOCK:
            raise SystemExit(f"{found} tokens were found in the cache, not about {expected}")
        return {
            "again_ms": 1e3 * statistics.median(again),
            "kept_ms": 1e3 * statistics.median(kept),
            "tokens": sorted(tokens),
            "bytes": from_host * llm.model_info.kv_bytes_per_token,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/llaisys-models"))
    parser.add_argument("--prefix", type=int, default=8000)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    directory = options.models / f"{options.shape}-{options.dtype}"
    model = str(write_shape_model(options.shape, options.dtype, directory))
    computed = measure(model, options, 0)
    back = measure(model, options, 2 << 30)
    copied = back["again_ms"] - back["kept_ms"]
    result = {
        "device": options.device,
        "shape": options.shape,
        "prefix_tokens": options.prefix,
        "computed_ms": round(computed["again_ms"], 2),
        "restored_ms": round(back["again_ms"], 2),
        "never_evicted_ms": round(back["kept_ms"], 2),
        "copied_mib": round(back["bytes"] / (1 << 20), 1),
        "restored_gb_s": round(back["bytes"] / 1e6 / copied, 2) if copied > 0 else None,
        "same_token": computed["tokens"] == back["tokens"],
    }
    print(json.dumps(result))
    return 0 if result["same_token"] else 1


if __name__ == "__main__":
    sys.exit(main())
