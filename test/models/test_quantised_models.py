"""GGUF models whose weights stay quantised: near the same file with its weights widened, smaller in
memory, and the same bits in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import tiny_config, write_gguf

from llaisys import LLM, SamplingParams

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
PROMPTS = [[5, 9, 200, 31], [7] * 19, [1, 2, 3]]


def best_logprobs(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Of every prompt: {token id: logprob} of the 20 best first tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, detokenize=False)
    return [dict(output.outputs[0].logprobs[0].top) for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_model_is_near_its_widened_self(
    kind: str, model_type: str, tied: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config(model_type, tie_word_embeddings=tied), kind=kind)
    with LLM(path, dtype="f32") as llm:
        wide = best_logprobs(llm, PROMPTS)
    with LLM(path) as llm:
        quantised = best_logprobs(llm, PROMPTS)
    for expected, got in zip(wide, quantised, strict=True):
        shared = expected.keys() & got.keys()
        assert len(shared) >= 15
        assert max(abs(expected[i] - got[i]) for i in shared) < 0.05


def test_a_sequence_keeps_its_bits_in_any_company(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config("qwen2"), kind="Q4_0")
    with LLM(path) as llm:
        together = best_logprobs(llm, PROMPTS * 3)
        alone = [best_logprobs(llm, [prompt])[0] for prompt in PROMPTS]
    assert together == alone * 3


def test_a_dtype_that_is_asked_for_widens_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config("qwen2"), kind="Q4_0")
    with LLM(path) as llm:
        quantised = best_logprobs(llm, PROMPTS)
    with LLM(path, dtype="f32") as llm:
        wide = best_logprobs(llm, PROMPTS)
    differences = [
        abs(a[i] - b[i]) for a, b in zip(quantised, wide, strict=True) for i in a.keys() & b.keys()
    ]
    assert np.max(differences) > 1e-6
