"""Captured hidden states, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from error_helpers import naming
from reference_models import Piece, Tiny, make_reference, opened, random_tokens, run_slot, save

from llaisys.common.errors import InvalidInputError


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_hidden_states_equal_transformers(tmp_path: Path, kind: str):
    model = make_reference(Tiny(kind=kind))
    save(model, tmp_path)
    tokens = random_tokens(23, 313)
    with torch.no_grad():
        found = model(torch.tensor([tokens]), output_hidden_states=True)
    expected = [h[0].numpy() for h in found.hidden_states]  # the last one is normed
    with opened(tmp_path, max_batch_tokens=8, kv_cache_layout="slot") as adapter:
        plain = run_slot(adapter, [Piece(0, tokens)])
    with opened(
        tmp_path, max_batch_tokens=8, kv_cache_layout="slot"
    ) as adapter:  # in several micro-batches
        adapter.capture_hidden_states((2, -1, 0))
        kept = run_slot(adapter, [Piece(0, tokens)])
        hidden = adapter.hidden_states(23)
        assert hidden.shape == (23, 180)
        for index, layer in enumerate((2, 3, 0)):
            part = hidden[:, 60 * index : 60 * index + 60]
            np.testing.assert_allclose(part, expected[layer], rtol=2e-4, atol=2e-5)
        np.testing.assert_array_equal(kept, plain)  # bitwise identical
        with naming(InvalidInputError, "layers[1]"):
            adapter.capture_hidden_states((0, 4))
        adapter.capture_hidden_states(())
        run_slot(adapter, [Piece(1, tokens)])
        assert adapter.hidden_states(23).shape == (23, 0)
