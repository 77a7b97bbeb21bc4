#!/usr/bin/env python3
"""Check that host and device memory stay constant over many steps of an engine.

    scripts/check_steps_memory.py [--device cuda] [--steps 10000] [--slack-mib 8]

A tiny random model serves requests of every kind: chunked prefill, shared prefixes, several
choices, seeds, penalties, logprobs, cancellation, a KV cache too small for all requests, and host
blocks. Compares the memory after a tenth of the steps with that at the end. Prints one JSON line;
exit status 1 when either grows by more than the slack.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from llaisys import SamplingParams
from llaisys.engine.config import EngineConfig
from llaisys.engine.llm_engine import LLMEngine
from llaisys.libllaisys.handles import device_memory

HELPERS = Path(__file__).resolve().parents[1] / "test" / "helpers"
MIB = 1 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def params_of(chance: random.Random) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": chance.randint(1, 40), "ignore_eos": True}
    if chance.random() < 0.5:
        fields |= {"temperature": 0.0}
    else:
        fields |= {"temperature": 0.9, "top_p": 0.9, "seed": chance.randint(0, 99)}
    if chance.random() < 0.2:
        fields["frequency_penalty"] = 0.5
    if chance.random() < 0.2:
        fields["logprobs"] = 3
    if chance.random() < 0.1:
        fields["n"] = 2
    return SamplingParams(detokenize=False, **fields)


def submit(engine: LLMEngine, chance: random.Random, beginnings: list[list[int]]) -> str:
    own = [chance.randint(3, 990) for _ in range(chance.randint(1, 30))]
    return engine.submit([*chance.choice(beginnings), *own], params_of(chance))


def run(engine: LLMEngine, options: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(1)
    beginnings = [[chance.randint(3, 990) for _ in range(96)] for _ in range(20)]
    open_names: set[str] = set()
    device, resident = [], []
    start, steps = time.perf_counter(), 0
    while steps < options.steps:
        while len(open_names) < 24:
            open_names.add(submit(engine, chance, beginnings))
        parts = engine.step()
        if chance.random() < 0.02:
            parts += engine.cancel(chance.choice(sorted(open_names)))
        open_names -= {part.request_id for part in parts if part.output is not None}
        steps += 1
        if steps % (options.steps // 20) == 0:
            free, total = device_memory(options.device)
            device.append(total - free)
            resident.append(resident_bytes())
    for name in sorted(open_names):
        engine.cancel(name)
    stats = engine.stats()
    growth = {
        "device_mib": (device[-1] - device[1]) / MIB if options.device != "cpu" else 0.0,
        "resident_mib": (resident[-1] - resident[1]) / MIB,
    }
    return {
        "device": options.device,
        "steps": steps,
        "seconds": round(time.perf_counter() - start, 1),
        "growth": {name: round(value, 2) for name, value in growth.items()},
        "device_used_mib": [round(value / MIB) for value in device],
        "resident_mib": [round(value / MIB) for value in resident],
        "preemptions": stats["num_preemptions"],
        "kv_blocks_restored": stats["kv_blocks_restored"],
        "flat": all(value <= options.slack_mib for value in growth.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--slack-mib", type=float, default=8.0)
    options = parser.parse_args()
    if options.steps < 20:
        parser.error("--steps must be at least 20")
    with tempfile.TemporaryDirectory() as directory:
        sys.path.insert(0, str(HELPERS))
        files: Any = importlib.import_module("model_files")
        config = files.tiny_config(
            hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
            intermediate_size=360, vocab_size=1000, max_position_embeddings=512,
        )  # fmt: skip
        files.write_hf_model(Path(directory), config)
        engine = LLMEngine(
            EngineConfig.of(
                model=directory,
                device=options.device,
                dtype="bf16",
                num_kv_blocks=96,
                max_num_seqs=16,
                max_num_batched_tokens=128,
                kv_offload="4MiB",
            )
        )
        try:
            result = run(engine, options)
        finally:
            engine.close()
    print(json.dumps(result), flush=True)
    return 0 if result["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
