#!/usr/bin/env python3
"""Tensor and pipeline parallel compared with one rank: tokens/s, warm-up and run time, time in
collectives.

    scripts/bench_tp.py --shape qwen2.5-0.5b         one rank, and two of half the threads each
    scripts/bench_tp.py --model DIR --device cuda --ranks 1 uni:2 mp:2
    scripts/bench_tp.py --shape qwen2.5-1.5b --device cuda --share-gpu --ranks 1 mp:2
    scripts/bench_tp.py --shape qwen2.5-0.5b --num-seqs 16 --new-tokens 32 --rounds 5
    scripts/bench_tp.py --shape qwen2.5-0.5b --num-seqs 16 --ranks 1 mp:pp2   two pipeline stages
    scripts/bench_tp.py --shape llama-3.1-70b --estimate      a model of several H200, no run

The defaults are the fixed configuration of the design (002 section 10.3): 256 sequences, 16384
tokens per step, a context of 4096. A configuration is BACKEND:RANKS, BACKEND:ppSTAGES, or 1. On the
CPU all configurations use the same cores (--threads, for all ranks together), stay open and run
alternately; the ratio is the median over rounds, which is robust against other load. On GPUs only
one is open at a time. The collective time is host time including the wait for other ranks; on GPUs
the streams wait instead: use `nsys profile` and look for ncclDevKernel_AllReduce. The collectives
of a pipeline are those of rank 0, the last stage: its waits for the stage before it (bubbles).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llaisys import LLM, SamplingParams
from llaisys.bench.latency import shape_model_path
from llaisys.models.synthetic import shape_config


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    tokens_per_second: float
    collective_share: float  # fraction of the run time, on rank 0
    collectives: int


def parse_configuration(text: str) -> tuple[str, int, int]:
    """Parse "mp:2" as ("mp", 2, 1) and "mp:pp2" as ("mp", 1, 2): backend, ranks, stages."""
    backend, _, ranks = text.rpartition(":")
    count = ranks.removeprefix("pp")
    if not count.isdecimal() or int(count) < 1 or backend not in ("", "uni", "mp", "ray"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not 1, uni:N, mp:N, ray:N, mp:ppN or ray:ppN"
        )
    sizes = (int(count), 1) if count == ranks else (1, int(count))
    return backend or "uni", *sizes


def open_llm(
    options: argparse.Namespace, backend: str, tp_size: int, stages: int
) -> tuple[LLM, float]:
    """The LLM, and the seconds to load it and complete a first request."""
    start, ranks = time.perf_counter(), tp_size * stages
    llm = LLM(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        max_num_seqs=options.num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        n_threads=max(1, options.threads // ranks) if options.device == "cpu" else 0,
        tensor_parallel_device_ids=(0,) * ranks if options.share_gpu else None,
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=stages,
        distributed_executor_backend=backend,
        vocab_parallel_head=options.vocab_parallel_head,
        replicate_kv_heads=options.replicate_kv_heads,
        numa=options.numa,
        enable_prefix_caching=False,
        seed=0,
    )
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True, temperature=0))
    return llm, time.perf_counter() - start


def run_once(llm: LLM, options: argparse.Namespace, seed: int) -> Run:
    rng = np.random.default_rng(seed)
    length = options.prompt_tokens
    vocabulary = llm.model_info.vocab_size
    prompts = [rng.integers(0, vocabulary, length).tolist() for _ in range(options.num_seqs)]
    params = SamplingParams(
        max_tokens=options.new_tokens, ignore_eos=True, temperature=0, detokenize=False
    )
    llm.profile(reset=True)
    start = time.perf_counter()
    llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    profile = llm.profile()
    collective = profile["stages"].get("native_collective", 0.0)
    count = profile["counts"].get("native_collective", 0)
    return Run(seconds, len(prompts) * options.new_tokens / seconds, collective / seconds, count)


def report(name: str, warm_up: float, runs: list[Run], base: list[Run]) -> dict[str, Any]:
    ratio = statistics.median(
        b.seconds / r.seconds for r, b in zip(runs, base, strict=True)
    )  # speed relative to the first configuration
    tokens = statistics.median(run.tokens_per_second for run in runs)
    share = statistics.median(run.collective_share for run in runs)
    seconds = statistics.median(run.seconds for run in runs)
    print(
        f"{name:8s} warm-up {warm_up:7.2f} s   run {seconds:8.2f} s   {tokens:9.1f} tok/s   "
        f"{ratio:6.3f} of the first   collectives {share:6.1%} ({runs[0].collectives} calls)",
        flush=True,
    )
    return {"name": name, "warm_up": warm_up, "ratio": ratio, "runs": [asdict(r) for r in runs]}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    names = [f"{b}:{n}" if stages == 1 else f"{b}:pp{stages}" for b, n, stages in options.ranks]
    together = options.device == "cpu"
    warm_ups: list[float] = []
    runs: list[list[Run]] = [[] for _ in names]
    with ExitStack() as stack:
        if together:
            opened = [open_llm(options, *configuration) for configuration in options.ranks]
            warm_ups = [seconds for _, seconds in opened]
            llms = [stack.enter_context(llm) for llm, _ in opened]
            for index in range(options.rounds):
                for llm, found in zip(llms, runs, strict=True):
                    found.append(run_once(llm, options, index))
        else:
            for configuration, found in zip(options.ranks, runs, strict=True):
                llm, seconds = open_llm(options, *configuration)
                warm_ups.append(seconds)
                with llm:
                    found += [run_once(llm, options, index) for index in range(options.rounds)]
    return [report(n, w, r, runs[0]) for n, w, r in zip(names, warm_ups, runs, strict=True)]


# For --estimate: an H200 (docs/internals/measurements), and all-reduce over peer memory, measured
# in a captured graph between ranks on one GPU, plus a signal over NVLink in each direction.
READ_BYTES_PER_SECOND = 4.39e12
STEP_OVERHEAD = 0.2e-3  # seconds of a decode step beside the weights: launches, attention, sampling
ALL_REDUCE = {2: 4.2e-6, 4: 4.8e-6, 8: 6.0e-6}  # 8: extrapolated
NVLINK_SIGNAL = 1.2e-6


def print_estimate(shape: str) -> None:
    """One sequence, 16-bit weights: each rank reads its part, then two all-reduces per layer."""
    config = shape_config(shape)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * width * (heads + kv_heads)
    mlp = 3 * hidden * config["intermediate_size"]
    weights = 2 * (layers * (attention + mlp) + hidden * config["vocab_size"])
    alone = weights / READ_BYTES_PER_SECOND + STEP_OVERHEAD
    print(f"{shape}, modelled for H200 with NVLink: 1 rank {alone * 1e3:.2f} ms per token")
    for ranks, all_reduce in ALL_REDUCE.items():
        collectives = (2 * layers + 1) * (all_reduce + 2 * NVLINK_SIGNAL)
        step = weights / ranks / READ_BYTES_PER_SECOND + STEP_OVERHEAD + collectives
        print(
            f"{ranks} ranks {step * 1e3:.2f} ms, {alone / step:.2f} times as fast; collectives "
            f"{collectives * 1e3:.2f} ms"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog="See the top of the file."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="directory, GGUF file or hub name")
    what.add_argument("--shape", help="random weights of this shape, e.g. qwen2.5-0.5b")
    parser.add_argument(
        "--ranks", nargs="+", type=parse_configuration, metavar="BACKEND:N",
        default=[("uni", 1, 1), ("uni", 2, 1), ("mp", 2, 1)],
    )  # fmt: skip
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="of all ranks together")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--no-vocab-parallel-head", dest="vocab_parallel_head", action="store_false"
    )
    parser.add_argument("--estimate", action="store_true", help="model 2, 4 and 8 GPUs; no run")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on GPU 0, by turns")
    parser.add_argument("--replicate-kv-heads", action="store_true")
    parser.add_argument("--numa", action="store_true")
    parser.add_argument("--json", action="store_true", help="all runs as JSON at the end")
    options = parser.parse_args()
    if options.estimate:
        print_estimate(options.shape or parser.error("--estimate needs --shape"))
        return 0
    if options.shape:
        options.model = str(shape_model_path(options.shape, options.dtype))
    print(
        f"{options.model} on {options.device}: {options.num_seqs} sequences, prompts of "
        f"{options.prompt_tokens}, {options.new_tokens} new tokens each, {options.rounds} rounds",
        flush=True,
    )
    results = measure(options)
    if options.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
