"""A draft head next to a quantised model is quantised too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from draft_heads import head_tensors, reference_head, write_head
from model_files import tiny_config, write_gguf

from llaisys.common.errors import ModelLoadError
from llaisys.common.step import ModelStepInput
from llaisys.models.base import AdapterOptions
from llaisys.models.draft_head import DraftHeadAdapter, open_draft_head
from llaisys.models.families import open_checkpoint

# Rows are multiples of 32, the block size.
CONFIG = tiny_config(
    "llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
    num_hidden_layers=7, vocab_size=300, tie_word_embeddings=True,
)  # fmt: skip


def test_head_shares_blocks_of_a_quantised_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    weights = write_gguf(path, CONFIG, kind="Q8_0")
    tensors = head_tensors("eagle3", CONFIG, 50)
    del tensors["lm_head.weight"]
    write_head(tmp_path / "head", CONFIG, tensors)
    rng = np.random.default_rng(1)
    tokens, features = rng.integers(0, 300, 9), rng.standard_normal((9, 192), dtype=np.float32)
    with open_checkpoint(path) as model:
        files = open_draft_head(tmp_path / "head", model)
        assert files.kind == "eagle3" and files.quantised_model
        blocks = files.shared_blocks("out_embed")
        assert blocks is not None and blocks.shape == (50, 64) and len(blocks.rows) == 50
        assert files.shared_blocks("feature_w") is None
        adapter = DraftHeadAdapter.load(files, AdapterOptions(kv_cache_layout="slot"))
        files.close()
    with adapter:
        zeros, ones = np.zeros(9, dtype=np.int64), np.ones(9, dtype=np.int8)
        adapter.forward_features(ModelStepInput(tokens, np.arange(9), zeros, ones), None, features)
        logits = adapter.logits()
    embedding = weights["model.embed_tokens.weight"]
    output = embedding[tensors["d2t"] + np.arange(50)]
    expected, _ = reference_head("eagle3", CONFIG, tensors, embedding, output, tokens, features)
    assert np.abs(logits - expected).max() < 0.2 * np.abs(expected).max()  # 4 bits
    assert np.corrcoef(logits.ravel(), expected.ravel())[0, 1] > 0.99

    with open_checkpoint(path) as model, pytest.raises(ModelLoadError):
        open_draft_head(None, model)
