#!/usr/bin/env python3
"""Time decode steps of a large model with a full KV cache on one GPU.

    scripts/bench_gpu_capacity.py [--shape llama-3.1-70b] [--weights f8_g128 i4_g128]
        [--sequences 8] [--tokens 32768] [--kv-cache-dtype fp8]

Random weights made on the GPU: linear weights in the given blocks, embedding and head in bf16. The
KV cache has room for all sequences; it is not filled, so the sequences of the long context attend
to zeros. Prints a JSON line for each format: seconds to load, GPU memory, milliseconds of a prompt
and of decode steps (median), and the time to read the weights and the keys and values of a step at
--bandwidth bytes per second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 16  # slots per KV block
CONTEXT = 128  # of the sequence alone
PROMPT = 2048


def run_steps(adapter: Any, n: int, context: int, width: int, count: int) -> list[float]:
    """Milliseconds of `count` greedy steps of n sequences after `context` tokens; `width`: KV
    blocks reserved for each."""
    from llaisys.common.step import AttentionMetadata, ModelStepInput, SamplingMetadata

    rows = np.arange(n, dtype=np.int32)
    greedy = SamplingMetadata(rows=rows, numbers={"temperature": np.zeros(n)})
    tokens = rows.astype(np.int64) + 1
    blocks = np.arange(n * width, dtype=np.int32).reshape(n, width)
    times = []
    for position in range(context, context + count):
        used = position // BLOCK + 1
        slots = blocks[:, position // BLOCK] * BLOCK + position % BLOCK
        attention = AttentionMetadata(
            slot_mapping=slots.astype(np.int32),
            batch_seq_ids=rows.astype(np.int64),
            context_lens=np.full(n, position + 1, np.int32),
            block_tables=np.ascontiguousarray(blocks[:, :used]),
        )
        positions = np.full(n, position, np.int64)
        step = ModelStepInput(tokens, positions, rows.astype(np.int64), np.ones(n, np.int8))
        start = time.perf_counter()
        adapter.forward(step, attention)
        tokens = adapter.sample(greedy).astype(np.int64)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def run_prompt(adapter: Any, n_tokens: int) -> float:
    """Milliseconds of a prompt of random tokens."""
    from llaisys.common.step import AttentionMetadata, ModelStepInput, SamplingMetadata

    greedy = SamplingMetadata(rows=np.zeros(1, np.int32), numbers={"temperature": np.zeros(1)})
    tokens = np.random.default_rng(0).integers(0, adapter.vocab_size, n_tokens)
    slots = np.arange(n_tokens, dtype=np.int64)
    is_output = np.zeros(n_tokens, np.int8)
    is_output[-1] = 1
    attention = AttentionMetadata(
        slot_mapping=slots.astype(np.int32),
        batch_seq_ids=np.zeros(1, np.int64),
        context_lens=np.array([n_tokens], np.int32),
        block_tables=np.arange(-(-n_tokens // BLOCK), dtype=np.int32).reshape(1, -1),
    )
    start = time.perf_counter()
    adapter.forward(ModelStepInput(tokens, slots, np.zeros_like(slots), is_output), attention)
    adapter.sample(greedy)
    return 1e3 * (time.perf_counter() - start)


def run_format(weights: str, options: argparse.Namespace) -> dict[str, Any]:
    from llaisys.bench.latency import read_bytes
    from llaisys.common.model_registry import get_adapter_class
    from llaisys.libllaisys.handles import device_memory
    from llaisys.models.base import AdapterOptions
    from llaisys.models.device import open_device
    from llaisys.models.families import open_checkpoint
    from llaisys.models.synthetic import write_shape_model

    open_device(options.device)
    width = -(-options.tokens // BLOCK)
    own = AdapterOptions(
        device=options.device,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_cache_block_size=BLOCK,
        kv_cache_capacity_tokens=options.sequences * width * BLOCK,
        max_model_len=width * BLOCK,
        max_batch_tokens=PROMPT,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape_model(options.shape, "bf16", Path(folder), options.layers, weights)
        start = time.perf_counter()
        with open_checkpoint(model) as checkpoint:
            family = get_adapter_class(checkpoint.config.model_type)
            adapter = family.load(checkpoint, own)
            load_s = time.perf_counter() - start
            read = read_bytes(checkpoint, own)
            weight_bytes = family.memory_needs(checkpoint, own, 1).weights
            kv_bytes = family.kv_bytes_per_token(checkpoint, own)
    long = options.tokens - options.steps

    def floor(tokens: int) -> float:
        return round(1e3 * (read + tokens * kv_bytes) / options.bandwidth, 2)

    try:
        run_prompt(adapter, min(PROMPT, options.tokens))  # algorithm selection
        prompt = run_prompt(adapter, min(PROMPT, options.tokens))
        alone = run_steps(adapter, 1, CONTEXT, width, options.steps)
        filled = run_steps(adapter, options.sequences, long, width, options.steps)
        used = 0
        if options.device != "cpu":
            free, total = device_memory(options.device)
            used = total - free
    finally:
        adapter.close()
    return {
        "shape": options.shape,
        "weights": weights,
        "load_s": round(load_s, 1),
        "weights_gb": round(weight_bytes / 1e9, 2),
        "kv_cache_gb": round(kv_bytes * options.sequences * width * BLOCK / 1e9, 2),
        "used_gb": round(used / 1e9, 2),
        f"prompt_{PROMPT}_ms": round(prompt, 1),
        "alone_ms": round(statistics.median(alone[4:]), 3),
        "alone_floor_ms": floor(CONTEXT),
        f"{options.sequences}_at_{long}_ms": round(statistics.median(filled[4:]), 3),
        "their_floor_ms": floor(options.sequences * long),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-70b")
    parser.add_argument("--layers", type=int, help="instead of those of the shape")
    parser.add_argument("--weights", nargs="+", default=["f8_g128", "i4_g128"])
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32768, help="of each sequence")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bandwidth", type=float, default=4.39e12, help="bytes per second")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # format of a subprocess
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_format(options.one, options)), flush=True)
        return 0
    status = 0
    for weights in options.weights:  # one process each: the memory of a model is freed
        command = [sys.executable, __file__, *sys.argv[1:], "--one", weights]
        status |= subprocess.run(command, check=False).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
