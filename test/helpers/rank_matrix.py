"""Combinations of options that must give the tokens of one rank, for every executor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from model_files import tiny_config, write_gguf, write_hf_model

from llaisys import LLM, SamplingParams

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 9, [3] * 40, [7, 8, 9] * 9 + [11, 12], [250, 17]]
DRAFTS = {"prompt_lookup_min": 1, "num_speculative_tokens": 3}

# (launch ahead, drafts, quantized, prefix cache, four ranks)
Row = tuple[bool, bool, bool, bool, bool]
EVERY: list[Row] = list(itertools.product((False, True), repeat=5))
# Every pair of values of two options: an orthogonal array of strength 2, from three columns.
PAIRWISE: list[Row] = [
    (a, b, c, a ^ b, b ^ c) for a, b, c in itertools.product((False, True), repeat=3)
]


def name_of(row: Row) -> str:
    names = ("async", "drafts", "quantized", "prefixes", "four")
    return "-".join(name for name, is_on in zip(names, row, strict=True) if is_on) or "plain"


def write_models(folder: Path) -> tuple[Path, Path]:
    """A model in f32 and one in Q8_0."""
    plain, quantized = folder / "plain", folder / "model.gguf"
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    write_hf_model(plain, tiny_config(**heads), tokenizer=False)
    wide = tiny_config(**heads, hidden_size=256, intermediate_size=256)
    write_gguf(quantized, wide, kind="Q8_0")
    return plain, quantized


def _tokens(llm: LLM) -> list[list[int]]:
    seeded = {"temperature": 0.9, "top_k": 20, "seed": 5, "repetition_penalty": 1.2}
    params = [
        SamplingParams(max_tokens=10 + i, ignore_eos=True, **({"temperature": 0}, seeded)[i % 2])
        for i in range(len(PROMPTS))
    ]
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


def _open(model: Path, **options: Any) -> LLM:
    shared = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_kv_blocks": 64, "block_size": 4}
    # Ranks add in another order; rounding to bf16 in attention would turn that into other tokens.
    return LLM(model=str(model), n_threads=1, kv_cache_dtype="f32", **shared, **options)


@cache
def _of_one_rank(model: Path) -> list[list[int]]:
    options = {"async_scheduling": "off", "enable_prefix_caching": False}
    with _open(model, **options) as llm:
        return _tokens(llm)


def check_row(models: tuple[Path, Path], backend: str, row: Row) -> None:
    """Compare with one rank that has none of the options, twice."""
    launches_ahead, drafts, quantized, prefixes, four = row
    model = models[quantized]
    with _open(
        model,
        tensor_parallel_size=4 if four else 2,
        distributed_executor_backend=backend,
        async_scheduling="on" if launches_ahead else "off",
        enable_prefix_caching=prefixes,
        **({"speculative_config": DRAFTS} if drafts else {}),
    ) as llm:
        core: Any = llm.llm_engine.core
        assert core.is_async == launches_ahead
        for _ in range(2):
            assert _tokens(llm) == _of_one_rank(model)
        stats = llm.stats()
        assert (stats["prefix_cache_hits"] > 0) == prefixes
        assert (stats["spec_decode_num_draft_tokens"] > 0) == drafts


def pairs(rows: list[Row]) -> Iterator[tuple[int, int, bool, bool]]:
    for row in rows:
        for i, j in itertools.combinations(range(5), 2):
            yield i, j, row[i], row[j]
