"""Parity of a user's model (--model-path DIR) with transformers, offline and served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from reference_models import Piece, opened, reference_logits, run_slot
from server_helpers import ServerProcess

from llaisys.common.sampling import SamplingParams
from llaisys.entrypoints.llm import LLM
from llaisys.tokenization import Tokenizer

pytestmark = pytest.mark.hf

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "今天天气怎么样？ 2 + 2 = ",
    "Once upon a time, in a village far away, there lived",
]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Iterator[Any]:
    """The transformers model in f32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    yield model.eval()


@pytest.fixture(scope="module")
def prompts(model_path: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_directory(model_path)
    theirs = transformers.AutoTokenizer.from_pretrained(model_path)
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert ids == [theirs(text)["input_ids"] for text in TEXTS]
    return ids


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids: list[int] = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )[0].tolist()
    return ids[len(prompt) :]


def test_logits_equal_transformers(
    model_path: Path, reference: Any, prompts: list[list[int]]
) -> None:
    """f32; the tolerance is relative to the spread of the logits."""
    with opened(model_path, dtype="f32", kv_cache_layout="slot", max_model_len=512) as adapter:
        for number, prompt in enumerate(prompts):
            ours = run_slot(adapter, [Piece(number, prompt)])
            expected = reference_logits(reference, prompt)
            assert np.abs(ours - expected).max() < 2e-3 * max(1.0, float(expected.std()))


def test_offline_greedy_tokens_equal_transformers(
    model_path: Path, reference: Any, prompts: list[list[int]]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(model_path), dtype="f32", max_model_len=512) as llm:
        found = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
    assert found == [greedy(reference, prompt) for prompt in prompts]


def test_served_tokens_equal_transformers(
    model_path: Path, reference: Any, prompts: list[list[int]]
) -> None:
    tokenizer = Tokenizer.from_directory(model_path)
    options = ("--model", str(model_path), "--dtype", "f32", "--max-model-len", "512")
    with ServerProcess(*options, real=True).wait_ready() as server, server.client() as client:
        for prompt in prompts:
            body = {"prompt": prompt, "temperature": 0, "max_tokens": NEW_TOKENS}
            answer = client.post("/v1/completions", json={**body, "ignore_eos": True})
            assert answer.status_code == 200, answer.text
            expected = tokenizer.decode_tokens([*prompt, *greedy(reference, prompt)])
            assert expected.endswith(answer.json()["choices"][0]["text"])
