"""Encoders on the GPU: embeddings and scores against transformers, batched and alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from encoder_models import ENCODERS, VOCAB, hidden_states, make_encoder, save_encoder
from reference_models import random_tokens

from llaisys import LLM

LENGTHS = (1, 2, 17, 64, 129, 300, 7)
PROMPTS = [[t + 4 for t in random_tokens(n, VOCAB - 4, seed=n)] for n in LENGTHS]
# Odd sizes, and a head size of the wgmma and mma.sync kernels each.
SIZES: list[dict[str, Any]] = [
    {},
    {"hidden_size": 256, "intermediate_size": 264},
    {"hidden_size": 320, "intermediate_size": 264},
]


@pytest.mark.parametrize("sizes", SIZES, ids=["odd", "head-64", "head-80"])
@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    model = make_encoder(name, max_position_embeddings=310, **sizes)
    save_encoder(model, tmp_path)
    states = [hidden_states(model, prompt) for prompt in PROMPTS]
    options: dict[str, Any] = {"max_num_batched_tokens": 320, "max_num_seqs": 8}
    for dtype, least in (("f32", 1 - 1e-7), ("bf16", 0.998)):
        with LLM(str(tmp_path), device="cuda", dtype=dtype, **options) as llm:
            for how in ("cls", "mean"):
                batched = [output.embedding for output in llm.embed(PROMPTS, pooling=how)]
                alone = [llm.embed(p, pooling=how)[0].embedding for p in PROMPTS]
                for one, other, state in zip(batched, alone, states, strict=True):
                    expected = state[0] if how == "cls" else state.mean(axis=0)
                    expected = expected / np.linalg.norm(expected)
                    for got in (one, other):
                        assert float(np.array(got) @ expected) > least, (dtype, how, len(state))
                        if dtype == "f32":
                            difference = np.abs(np.array(got) - expected).max()
                            assert difference < 1e-4 * np.abs(expected).max()


def test_scores_of_pairs(tmp_path: Path) -> None:
    model = make_encoder("bert", "ForSequenceClassification")
    save_encoder(model, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    documents = ["a dog ran", "mat", "cats on the mat"]
    with torch.no_grad():
        expected = [
            torch.sigmoid(model(**tokenizer("the cat", text, return_tensors="pt")).logits)[0, 0]
            for text in documents
        ]
    with LLM(str(tmp_path), device="cuda") as llm:
        np.testing.assert_allclose(llm.score("the cat", documents), expected, rtol=1e-4)
