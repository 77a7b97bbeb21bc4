"""Every dense family on the GPU: logits against transformers, greedy tokens against the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_models import MODELS, VOCAB, make_model
from reference_models import BLOCK, Piece, opened, random_tokens, reference_logits, run_block, save

from llaisys import LLM, SamplingParams

# In 16 bits head sizes that the fused kernels support, and one that they do not.
SIZES: list[dict[str, Any]] = [{}, {"hidden_size": 256, "intermediate_size": 264, "head_dim": 64}]


@pytest.mark.parametrize("sizes", SIZES, ids=["odd", "aligned"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    if name == "phi4-longrope":
        sizes = {}  # one factor per rotated pair
    model = make_model(name, **sizes)
    directory = save(model, tmp_path)
    tokens = random_tokens(41, VOCAB)
    expected = reference_logits(model, tokens)
    largest = float(np.abs(expected).max())
    for dtype, tolerance in (("f32", 1e-4), ("bf16", 0.15)):
        with opened(
            directory,
            device="cuda",
            dtype=dtype,
            kv_cache_capacity_tokens=4 * BLOCK,
            max_model_len=60,
        ) as adapter:
            blocks = {0: [2, 0, 1]}
            found = [
                run_block(adapter, [Piece(0, tokens[:23])], blocks),
                run_block(adapter, [Piece(0, tokens[23:40], 23)], blocks),
                run_block(adapter, [Piece(0, tokens[40:], 40)], blocks),
            ]
            got = np.concatenate(found)
        assert np.abs(got - expected).max() < tolerance * largest, dtype


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_in_graphs_and_from_the_prefix_cache(name: str, tmp_path: Path) -> None:
    directory = save(make_model(name), tmp_path)
    prompts = [random_tokens(length, VOCAB, length) for length in (5, 33, 18)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    found = []
    for device in ("cpu", "cuda"):
        with LLM(str(directory), device=device, max_model_len=64, num_kv_blocks=40) as llm:
            first = [output.token_ids for output in llm.generate(prompts, params)]
            again = [output.token_ids for output in llm.generate(prompts, params)]
            assert again == first
            found.append(first)
    assert found[0] == found[1]
