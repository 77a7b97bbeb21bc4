"""`llaisys bench throughput`: the engine with many concurrent requests, and the effect of prefix
caching."""

import statistics
import time
from typing import Any

import numpy as np

from llaisys.bench.decoding import decode, fixed_length
from llaisys.common.progress import report
from llaisys.common.validation import invalid_value
from llaisys.entrypoints.llm import LLM

SHARED_PREFIX = 512  # common prompt tokens in the prefix caching measurement
OWN_TOKENS = 16
PREFIX_REQUESTS = 32


def run_throughput(
    llm: LLM,
    concurrencies: list[int],
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    repeats: int = 5,
    profile: bool = False,
) -> dict[str, Any]:
    """`run_concurrencies` plus the prefix caching measurement; `profile`: include stage times."""
    results = run_concurrencies(llm, concurrencies, prompt_tokens, new_tokens, repeats)
    if not profile:
        for result in results:
            del result["stage_ms_per_step"]
    return {
        "runs": results,
        "prefix_cache": _prefix_cache(llm, np.random.default_rng(1)),
    }


def run_concurrencies(
    llm: LLM, concurrencies: list[int], prompt_tokens: int, new_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Medians of interleaved runs, per concurrency."""
    for concurrency in concurrencies:
        _check_room(llm, concurrency, prompt_tokens + new_tokens)
    rng = np.random.default_rng(0)
    samples: dict[int, list[dict[str, Any]]] = {n: [] for n in concurrencies}
    for done in range(repeats):
        for number, concurrency in enumerate(concurrencies):
            report("measuring", done * len(concurrencies) + number, repeats * len(concurrencies))
            samples[concurrency].append(_one(llm, rng, concurrency, prompt_tokens, new_tokens))
    return [_median(runs) for runs in samples.values()]


def _check_room(llm: LLM, concurrency: int, tokens: int) -> None:
    """Raise unless all requests fit into the KV cache at once."""
    info = llm.model_info
    blocks = concurrency * -(-tokens // info.block_size)
    if blocks > info.num_blocks:
        raise invalid_value(
            "concurrency",
            concurrency,
            f"so that requests of {tokens} tokens fit into the KV cache: they need {blocks} blocks "
            f"of {info.num_blocks}; raise --kv-cache-memory-bytes to at least "
            f"{blocks * info.block_size * info.kv_bytes_per_token} bytes",
        )


def _prompts(llm: LLM, rng: np.random.Generator, count: int, length: int) -> list[list[int]]:
    return [rng.integers(0, llm.model_info.vocab_size, length).tolist() for _ in range(count)]


def _one(
    llm: LLM, rng: np.random.Generator, concurrency: int, prompt_tokens: int, new_tokens: int
) -> dict[str, Any]:
    params = fixed_length(new_tokens)
    llm.profile(reset=True)
    start = time.perf_counter()
    prompts = _prompts(llm, rng, concurrency, prompt_tokens)
    found = decode(llm, [(prompt, params) for prompt in prompts])
    seconds = time.perf_counter() - start
    profile = llm.profile()
    return {
        "concurrency": concurrency,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "decode_tok_s": found.tok_s(only_full=True),
        "total_tok_s": concurrency * new_tokens / seconds,  # the time of prompts included
        "outside_native_ms_per_step": profile["outside_native_ms_per_step"],
        "stage_ms_per_step": {  # per worker stage
            stage: 1e3 * seconds / profile["steps"] for stage, seconds in profile["stages"].items()
        },
    }


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    result = dict(runs[0])
    for name in ("decode_tok_s", "total_tok_s", "outside_native_ms_per_step"):
        result[name] = round(statistics.median(run[name] for run in runs), 3)
    result["stage_ms_per_step"] = {
        stage: round(statistics.median(run["stage_ms_per_step"][stage] for run in runs), 4)
        for stage in result["stage_ms_per_step"]
    }
    return result


def _prefix_cache(llm: LLM, rng: np.random.Generator) -> dict[str, float]:
    """Simultaneous requests with a shared prefix, compared with requests without one."""
    if llm.model_info.max_model_len < SHARED_PREFIX + OWN_TOKENS + 2:
        return {}
    report("measuring shared prefixes")
    alone = _prefill_seconds(llm, _prompts(llm, rng, PREFIX_REQUESTS, SHARED_PREFIX + OWN_TOKENS))
    before = llm.stats()
    prefix = _prompts(llm, rng, 1, SHARED_PREFIX)[0]
    own = _prompts(llm, rng, PREFIX_REQUESTS, OWN_TOKENS)
    shared = _prefill_seconds(llm, [prefix + tail for tail in own])
    after = llm.stats()
    queries = after["prefix_cache_queries"] - before["prefix_cache_queries"]
    hits = after["prefix_cache_hits"] - before["prefix_cache_hits"]
    return {
        "hit_rate": round(hits / queries, 4) if queries else 0.0,
        "speedup": round(alone / shared, 2),
    }


def _prefill_seconds(llm: LLM, prompts: list[list[int]]) -> float:
    start = time.perf_counter()
    llm.generate(prompts, fixed_length(1))
    return time.perf_counter() - start
