"""Every dense family on the GPU: logits against transformers, greedy tokens against the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_models import MODELS, VOCAB, make_model
from family_parity import check_cuda_greedy_tokens, chunked_cuda_logits
from reference_models import random_tokens, reference_logits, save

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
        got = chunked_cuda_logits(directory, tokens, dtype)
        assert np.abs(got - expected).max() < tolerance * largest, dtype


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_in_graphs_and_from_the_prefix_cache(name: str, tmp_path: Path) -> None:
    check_cuda_greedy_tokens(save(make_model(name), tmp_path), VOCAB)
