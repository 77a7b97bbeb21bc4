"""A KV cache in 8 bits (`kv_cache_dtype="q8"`): tokens do not depend on the batch, are close to
f32, and take half the bytes of 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from error_helpers import invalid_input
from model_files import tiny_config, write_hf_model

from llaisys import LLM, SamplingParams
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.estimate import estimate_memory

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 9, [3] * 40, [7, 8, 9] * 9 + [11, 12], [250, 17]]
BLOCKS, BLOCK = 64, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv8") / "model"
    write_hf_model(path, tiny_config(num_attention_heads=8, num_key_value_heads=4), tokenizer=False)
    return path


def open_llm(model: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "max_num_seqs": 4, "num_kv_blocks": BLOCKS, "block_size": BLOCK, "n_threads": 1,
        "kv_cache_dtype": "q8",
    }  # fmt: skip
    return LLM(model=str(model), **{**defaults, **options})


def sampling() -> list[SamplingParams]:
    """Alternately greedy and seeded."""
    return [
        SamplingParams(max_tokens=30 + i, ignore_eos=True, temperature=0.9 * (i % 2), seed=5)
        for i in range(len(PROMPTS))
    ]


def tokens_of(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, sampling())]


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[list[list[int]]]:
    """One request at a time, nothing shared."""
    with open_llm(model, enable_prefix_caching=False) as llm:
        yield [
            list(llm.generate(prompt, params)[0].outputs[0].token_ids)
            for prompt, params in zip(PROMPTS, sampling(), strict=True)
        ]


def test_batch_chunks_threads_and_prefix_cache_change_no_token(
    model: Path, alone: list[list[int]]
) -> None:
    with open_llm(model, max_num_batched_tokens=16, n_threads=3) as llm:
        assert tokens_of(llm) == alone
        assert tokens_of(llm) == alone
        assert llm.stats()["prefix_cache_hits"] > 0


def test_preemption_changes_no_token(model: Path, alone: list[list[int]]) -> None:
    with open_llm(model, num_kv_blocks=20, max_num_batched_tokens=16) as llm:
        assert tokens_of(llm) == alone
        assert llm.stats()["num_preemptions"] > 0


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_ranks_change_no_token(model: Path, alone: list[list[int]], backend: str) -> None:
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": backend}
    with open_llm(model, **options) as llm:
        assert tokens_of(llm) == alone


def test_answers_are_near_those_of_f32(model: Path) -> None:
    """Stated tolerance: 0.02 in the log-probability of a prompt's tokens, on random weights."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=0)
    found: dict[str, list[float]] = {}
    for dtype in ("f32", "q8"):
        with open_llm(model, kv_cache_dtype=dtype) as llm:
            prompt = llm.generate(PROMPTS[3], params)[0].prompt_logprobs
        assert prompt is not None
        found[dtype] = [entry.logprob for entry in prompt[1:]]  # the first has none
    assert found["q8"] != found["f32"]  # it was used
    assert found["q8"] == pytest.approx(found["f32"], abs=0.02)


def test_bytes_are_half_of_16_bits_and_a_scale(model: Path) -> None:
    """4 KV heads of 8, 2 layers, keys and values; a scale has 4 bytes."""
    config = EngineConfig.of(
        model=str(model), num_kv_blocks=BLOCKS, block_size=BLOCK, kv_cache_dtype="int8"
    )
    layers, heads, dim = 2, 4, 8
    wanted = BLOCKS * BLOCK * 2 * layers * heads * (dim + 4)
    assert estimate_memory(config).kv_cache == wanted
    with open_llm(model) as llm:
        assert llm.stats()["kv_cache_bytes"] == wanted


def test_fp8_is_rejected_on_the_cpu_with_the_option_name() -> None:
    with invalid_input("kv_cache_dtype"):
        EngineConfig.of(kv_cache_dtype="fp8_e4m3", device="cpu")
