"""Greedy decoding of a real model, token by token against transformers in f32.

    pytest -q test/models/test_infer.py --model-path DIR

Default: SmolLM2-135M-Instruct from a wheel. This engine decodes; transformers then scores prompt
and answer in one pass and must choose the same token at every step, which equals decoding both side
by side.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from nightly import NIGHTLY
from quick_gguf import quick_gguf
from reference_models import opened, reference_logits

from llaisys.common.step import ModelStepInput, SamplingMetadata
from llaisys.models.families import open_checkpoint
from llaisys.models.loading.resolve import DEFAULT_MODEL, resolve_model
from llaisys.models.native import NativeAdapter
from llaisys.tokenization import Tokenizer

pytestmark = pytest.mark.parity

NEW_TOKENS = 64 if NIGHTLY else 20
TIE = 1e-3  # accept a different choice when the two best logits are this close
PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain how a bicycle stays upright.",
    "List three primes greater than 100.",
    "Translate 'good morning' into Spanish.",
    "def fibonacci(n):",
    "Who wrote Don Quixote?",
    "Summarise the water cycle in one sentence.",
    "Give me a recipe for pancakes.",
    "What is 17 * 23?",
    "Why is the sky blue?",
    "Name a mammal that lays eggs.",
    "Schreibe einen Satz über den Winter.",
    "用一句话介绍北京。",
    "Once upon a time, in a village by the river,",
    "SELECT name FROM users WHERE",
    "The three laws of motion are",
    "What should I do if I lose my passport?",
    "Tell me a joke about computers.",
    "🙂 means",
]
if not NIGHTLY:
    PROMPTS = PROMPTS[1::3]


@pytest.fixture(scope="module")
def path(request: pytest.FixtureRequest) -> Path:
    given: Path | None = request.config.getoption("--model-path")
    return given if given is not None else resolve_model(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    source: dict[str, Any] = {"dtype": torch.float32}
    directory = path
    if path.is_file():
        directory, source["gguf_file"] = path.parent, path.name
    with quick_gguf():
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, **source)
    return model.eval()


def decode_greedily(adapter: NativeAdapter, prompts: list[list[int]]) -> list[list[int]]:
    """Decode all prompts in one batch: prefill in one step, then one token each per step."""
    count = len(prompts)
    greedy = SamplingMetadata(
        rows=np.arange(count, dtype=np.int32), numbers={"temperature": np.zeros(count)}
    )
    pieces, starts = prompts, [0] * count
    sampled: list[list[int]] = [[] for _ in prompts]
    for _ in range(NEW_TOKENS):
        lengths = [len(piece) for piece in pieces]
        mask = np.zeros(sum(lengths), np.int8)
        mask[np.cumsum(lengths) - 1] = 1
        step = ModelStepInput(
            np.concatenate(pieces).astype(np.int64),
            np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]),
            np.repeat(np.arange(count, dtype=np.int64), lengths),
            mask,
        )
        adapter.forward(step, None)
        tokens = adapter.sample(greedy).tolist()
        starts = [start + n for start, n in zip(starts, lengths, strict=True)]
        pieces = [[token] for token in tokens]
        for answer, token in zip(sampled, tokens, strict=True):
            answer.append(token)
    return sampled


def test_greedy_tokens_equal_transformers(path: Path, reference: Any) -> None:
    with open_checkpoint(path) as checkpoint:
        tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    capacity = sum(len(prompt) + NEW_TOKENS for prompt in prompts)
    with opened(
        path,
        kv_cache_layout="slot",
        kv_cache_capacity_tokens=capacity,
        max_model_len=2048,
        dtype="f32",
    ) as adapter:
        answers = decode_greedily(adapter, prompts)
    compared = 0
    for text, prompt, answer in zip(PROMPTS, prompts, answers, strict=True):
        logits = reference_logits(reference, prompt + answer[:-1])[len(prompt) - 1 :]
        for step, (token, row) in enumerate(zip(answer, logits, strict=True)):
            best = int(row.argmax())
            if token != best:
                gap = float(row[best] - row[token])
                print(f"{text!r}, token {step}: ours {token}, transformers {best}, gap {gap}")
                assert gap < TIE
                break
            compared += 1
    assert compared > 0.9 * len(PROMPTS) * NEW_TOKENS
