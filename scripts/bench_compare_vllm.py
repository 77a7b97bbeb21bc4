#!/usr/bin/env python3
"""The project's fixed GPU workload with this engine, and with vLLM where it is installed.

    scripts/bench_compare_vllm.py [--shape qwen2.5-1.5b] [--engine ours|vllm|both] [--repeats 2]
    scripts/bench_compare_vllm.py --sweep ...       scripts/bench_gpu_sweep.py with these options

256 prompts of random tokens, input and output lengths uniform in 100..1024, at most 256 sequences
and 16,384 tokens per step, context of 4,096, greedy. Then a single sequence (128 tokens of context,
512 new) and a single prompt of 4,000 tokens. Random weights in bf16. Prints one JSON line per
engine.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

PROMPTS = 256
LENGTHS = (100, 1024)
ALONE = (128, 512)  # context and new tokens of the single sequence
PREFILL = 4000
VOCABULARY = 150_000  # upper bound of prompt token ids


def workload() -> list[tuple[list[int], int]]:
    """(prompt, new tokens) per request."""
    chance = random.Random(0)
    return [
        (
            [chance.randrange(VOCABULARY) for _ in range(chance.randint(*LENGTHS))],
            chance.randint(*LENGTHS),
        )
        for _ in range(PROMPTS)
    ]


def prompt_of(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(length)]


def measure(generate: Any, repeats: int) -> dict[str, Any]:
    """`generate(requests)` completes [(prompt, new tokens)] and returns the generated tokens."""
    requests = workload()
    generate([(prompt_of(64, 1), 8)] * 4)  # warm
    seconds, alone, prefill = [], [], []
    tokens = 0
    for run in range(repeats):
        start = time.perf_counter()
        tokens = generate(requests)
        seconds.append(time.perf_counter() - start)
        prompt = prompt_of(ALONE[0], 2 + run)
        start = time.perf_counter()
        generate([(prompt, ALONE[1])])
        alone.append(ALONE[1] / (time.perf_counter() - start))
    for run in range(5):
        prompt = prompt_of(PREFILL, 100 + run)
        start = time.perf_counter()
        generate([(prompt, 1)])
        prefill.append(time.perf_counter() - start)
    return {
        "workload_tok_s": round(tokens / statistics.median(seconds), 1),
        "workload_s": [round(s, 3) for s in seconds],
        "alone_tok_s": round(statistics.median(alone), 1),
        "prefill_4000_ms": round(1e3 * statistics.median(prefill), 2),
    }


class Limits(NamedTuple):
    max_model_len: int = 4096
    max_num_seqs: int = PROMPTS
    max_num_batched_tokens: int = 16384


@contextmanager
def open_engine(engine: str, model: Path, limits: Limits, **options: Any) -> Iterator[Any]:
    """Yield `generate(requests)`, which completes [(prompt, new tokens)] greedily and returns the
    number of generated tokens. engine: ours or vllm, with prefix caching off."""
    more = {**limits._asdict(), "enable_prefix_caching": False, **options}
    sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    if engine == "ours":
        from llaisys import LLM, SamplingParams

        with LLM(str(model), device="cuda", **more) as llm:

            def generate(requests: list[tuple[list[int], int]]) -> int:
                outputs = llm.generate(
                    [prompt for prompt, _ in requests],
                    [SamplingParams(max_tokens=n, **sampling) for _, n in requests],
                )
                return sum(len(output.token_ids) for output in outputs)

            yield generate
        return
    vllm: Any = importlib.import_module("vllm")
    theirs = vllm.LLM(str(model), skip_tokenizer_init=True, **more)

    def generate_theirs(requests: list[tuple[list[int], int]]) -> int:
        outputs = theirs.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [vllm.SamplingParams(max_tokens=n, **sampling) for _, n in requests],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    yield generate_theirs


def run(engine: str, model: Path, repeats: int, **options: Any) -> dict[str, Any]:
    start = time.perf_counter()
    with open_engine(engine, model, Limits(), **options) as generate:
        generate([(prompt_of(16, 0), 1)])
        first = time.perf_counter() - start
        return {"first_token_s": round(first, 2), **measure(generate, repeats)}


def main() -> int:
    if "--sweep" in sys.argv:
        import bench_gpu_sweep  # imports this module

        return bench_gpu_sweep.main([given for given in sys.argv[1:] if given != "--sweep"])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/llaisys-models"))
    parser.add_argument("--engine", choices=("ours", "vllm", "both"), default="both")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--async-scheduling", choices=("auto", "on", "off"), default="auto",
                        help="of ours")  # fmt: skip
    options = parser.parse_args()
    from peers.random_files import write_model_files

    model = write_model_files(options.shape, "bf16", options.models / f"{options.shape}-bf16")
    if options.engine == "both":  # separate processes: both need the whole GPU
        status = 0
        for engine in ("ours", "vllm"):
            ended = subprocess.run([sys.executable, __file__, "--shape", options.shape, "--models",
                            str(options.models), "--engine", engine, "--repeats",
                            str(options.repeats), "--async-scheduling", options.async_scheduling],
                            check=False)  # fmt: skip
            status = status or ended.returncode
        return status
    if options.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        print(json.dumps({"engine": "vllm", "error": "not installed"}))
        return 0
    more = {"async_scheduling": options.async_scheduling} if options.engine == "ours" else {}
    result = {**more, **run(options.engine, model, options.repeats, **more)}
    print(json.dumps({"engine": options.engine, "shape": options.shape, **result}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
