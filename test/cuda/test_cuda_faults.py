"""GPU: preemption with a small KV cache, and out of memory during a step.

The latter takes the whole memory: tests of other processes on the GPU fail meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_files import tiny_config, write_hf_model

from llaisys import LLM, SamplingParams
from llaisys.common.errors import LlaisysError
from llaisys.libllaisys.handles import Tensor, device_memory

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


def test_preemption_keeps_tokens(directory: Path) -> None:
    params = SamplingParams(max_tokens=40, **GREEDY)
    tokens = []
    for blocks in (400, 14):
        with LLM(str(directory), device="cuda", dtype="f32", num_kv_blocks=blocks) as llm:
            tokens.append([output.token_ids for output in llm.generate(PROMPTS, params)])
            preempted = llm.stats()["num_preemptions"]
    assert tokens[0] == tokens[1] and preempted > 0


def take_all_but(num_bytes: int) -> list[Tensor]:
    """Allocates GPU memory, cached blocks included, until less than this is free."""
    taken: list[Tensor] = []
    free, _ = device_memory("cuda")
    size = free
    while size >= num_bytes:
        try:
            taken.append(Tensor.create((size // 4,), "f32", "cuda"))
        except LlaisysError:
            size //= 2
    return taken


def test_out_of_memory_fails_requests_with_byte_counts_and_recovers(
    directory: Path,
) -> None:
    """300 rows with penalties need a 60 MB copy of their logits; less than half is free."""
    many = [[i + 3, 5] for i in range(300)]
    asked = SamplingParams(max_tokens=3, repetition_penalty=1.2, **GREEDY)
    with LLM(
        str(directory), device="cuda", dtype="bf16", num_kv_blocks=700, max_num_seqs=300
    ) as llm:
        expected = [output.token_ids for output in llm.generate(many[:2], asked)]
        taken = take_all_but(32 << 20)
        try:
            ended = llm.generate(many, asked)
        finally:
            for tensor in taken:
                tensor.close()
        errors = [str(o.outputs[0].error) for o in ended if o.finish_reason == "error"]
        assert errors and all("bytes of memory of GPU 0" in error for error in errors)
        assert [output.token_ids for output in llm.generate(many[:2], asked)] == expected
        assert {output.finish_reason for output in llm.generate(many, asked)} == {"length"}
