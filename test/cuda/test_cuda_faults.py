"""A KV cache on the GPU that is too small for all requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_files import tiny_config, write_hf_model

from llaisys import LLM, SamplingParams

PROMPTS = [[i + 3] * (20 + 7 * i) for i in range(12)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("cuda-faults")
    config = tiny_config(
        hidden_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
        intermediate_size=96, vocab_size=50_000, max_position_embeddings=512,
    )  # fmt: skip
    write_hf_model(path, config)
    return path


def test_a_cache_that_is_too_small_for_all_gives_the_same_tokens(directory: Path) -> None:
    params = SamplingParams(max_tokens=40, **GREEDY)
    tokens = []
    for blocks in (400, 14):
        with LLM(str(directory), device="cuda", dtype="f32", num_kv_blocks=blocks) as llm:
            tokens.append([output.token_ids for output in llm.generate(PROMPTS, params)])
            preempted = llm.stats()["num_preemptions"]
    assert tokens[0] == tokens[1] and preempted > 0
