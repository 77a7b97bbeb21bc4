#!/usr/bin/env python3
"""Throughput of the HTTP server with many streams, compared with the engine alone.

    scripts/bench_gpu_server.py [--device cuda] [--shape qwen2.5-1.5b] [--streams 64]
        [--requests 256] [--prompt-tokens 128] [--new-tokens 256] [--clients 4]
        [--long-prompt 8000]

Random weights and a synthetic tokenizer. Offline: `LLM.generate` of all requests with
`max_num_seqs` = `--streams`. Then `llaisys serve` with the same limit, and `--clients` processes
that share the streams, each a closed loop of `llaisys bench serve`: one process cannot read all
streams. `--long-prompt`: the same load again beside one client whose prompts have that many tokens.
Prints one JSON line: generated tokens per second of each and their ratio, percentiles of the
inter-token latency. Exit status 1 when a request fails or the ratio is below `--at-least` (0: only
measure).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llaisys.bench.serve import LoadGenerator, ServeOptions, percentiles, summarise
from llaisys.models.synthetic import SHAPES, write_shape_model

START_SECONDS = 180


def byte_characters() -> list[str]:
    """Characters of the bytes 0..255 in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def write_tokenizer(directory: Path, size: int) -> None:
    """Byte tokens, then tokens that no text encodes to."""
    tokens = byte_characters() + [f"w{number}" for number in range(size - 256)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    state = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {**level, "use_regex": True},
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(state))
    (directory / "tokenizer_config.json").write_text("{}")


def run_offline(model: str, options: argparse.Namespace) -> float:
    """Generated tokens per second of the second of two runs."""
    from llaisys import LLM, SamplingParams

    params = SamplingParams(max_tokens=options.new_tokens, temperature=0.0, ignore_eos=True)
    rng, speed = np.random.default_rng(0), 0.0
    fixed = engine_options(options) | {"max_num_seqs": options.streams}
    with LLM(model, **fixed) as llm:
        for _ in range(2):
            prompts = rng.integers(0, 256, (options.requests, options.prompt_tokens)).tolist()
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            tokens = sum(len(output.token_ids) for output in outputs)
            speed = tokens / (time.perf_counter() - start)
    return speed


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Engine options of both."""
    length = options.prompt_tokens + options.new_tokens + 64
    longest = max(length, options.long_prompt * 5 // 4 + 64)
    return {
        "device": options.device,
        "max_num_seqs": options.streams + bool(options.long_prompt),
        "max_model_len": longest,
        "num_kv_blocks": options.streams * -(-length // 16) + -(-longest // 16) + 64,
        "max_num_batched_tokens": max(8192, options.streams + 1),
        "async_scheduling": options.async_scheduling,
    }


class ClientResult(NamedTuple):
    start: float
    end: float
    tokens: int
    failures: dict[str, int]
    gaps: list[float]  # between tokens of a stream
    ttft_ms: dict[str, float | None]


def run_client(load: ServeOptions) -> ClientResult:
    async def run() -> ClientResult:
        generator = LoadGenerator(load)
        try:
            await generator.prepare()
            result = summarise(generator, await generator.run())
        finally:
            generator.pool.close()
        good = [sample for sample in generator.samples if sample.error is None]
        times = [time for sample in generator.samples for time in (sample.start, sample.end)]
        return ClientResult(
            min(times), max(times), sum(s.num_tokens for s in good), dict(result.reasons),
            [gap for s in good for gap in s.gaps], result.report["ttft_ms"],
        )  # fmt: skip

    return asyncio.run(run())


def run_served(model: str, options: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [sys.executable, "-m", "llaisys", "serve", "--model", model, "--port", str(port)]
    for name, value in engine_options(options).items():
        arguments += ["--" + name.replace("_", "-"), str(value)]
    server = subprocess.Popen(arguments)
    try:
        wait_ready(server, f"http://127.0.0.1:{port}/health")
        load = ServeOptions(
            url=f"http://127.0.0.1:{port}",
            chat=False,
            concurrency=options.streams // options.clients,
            requests=options.requests // options.clients,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
        )
        fresh = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.clients + 1, mp_context=fresh) as pool:
            list(pool.map(run_client, [load] * options.clients))  # warm
            results = list(pool.map(run_client, [load] * options.clients))
            found = served(results)
            if options.long_prompt:
                long = replace(
                    load,
                    concurrency=1,
                    requests=32,
                    prompt_tokens=options.long_prompt,
                    new_tokens=1,
                )
                *beside, of_long = pool.map(run_client, [load] * options.clients + [long])
                names = ("served_tok_s", "itl_ms", "failures")
                found["beside_long_prompts"] = {name: served(beside)[name] for name in names}
                found["beside_long_prompts"]["ttft_ms"] = of_long.ttft_ms
                found["failures"] |= served(beside)["failures"] | of_long.failures
    finally:
        server.terminate()
        server.wait(60)
    return found


def served(results: list[ClientResult]) -> dict[str, Any]:
    seconds = max(r.end for r in results) - min(r.start for r in results)
    return {
        "served_tok_s": round(sum(r.tokens for r in results) / seconds, 1),
        "itl_ms": percentiles([gap for r in results for gap in r.gaps]),
        "failures": {reason: count for r in results for reason, count in r.failures.items()},
    }


def wait_ready(server: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready after {START_SECONDS} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="qwen2.5-1.5b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/llaisys-models"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--long-prompt", type=int, default=0, help="tokens; 0: none")
    parser.add_argument("--async-scheduling", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--at-least", type=float, default=0.0)
    options = parser.parse_args()
    if options.streams % options.clients or options.requests % options.clients:
        parser.error("--clients must divide --streams and --requests")
    directory = options.models / f"{options.shape}-{options.dtype}-text"
    model = write_shape_model(options.shape, options.dtype, directory)
    write_tokenizer(model, SHAPES[options.shape]["vocab_size"])
    online = run_served(str(model), options)
    offline = run_offline(str(model), options)
    ratio = online["served_tok_s"] / offline
    result = {
        "device": options.device,
        "shape": options.shape,
        "streams": options.streams,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "async_scheduling": options.async_scheduling,
        "offline_tok_s": round(offline, 1),
        "served_of_offline": round(ratio, 4),
        **online,
    }
    print(json.dumps(result), flush=True)
    return int(bool(online["failures"]) or ratio < options.at_least)


if __name__ == "__main__":
    sys.exit(main())
