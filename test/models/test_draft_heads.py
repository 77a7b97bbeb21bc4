"""Draft heads: their files, and their forward pass against numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_heads import head_tensors, reference_head, write_head
from error_helpers import naming
from model_files import tiny_config, write_hf_model

from llaisys.common.errors import InvalidInputError, ModelLoadError, NativeError
from llaisys.common.step import ModelStepInput
from llaisys.models.base import AdapterOptions
from llaisys.models.draft_head import DraftHeadAdapter, open_draft_head
from llaisys.models.families import open_checkpoint

KINDS = ("eagle", "eagle3", "mtp")
# Odd sizes on purpose.
CONFIG = tiny_config(
    hidden_size=60,
    num_hidden_layers=7,
    num_attention_heads=6,
    intermediate_size=101,
    vocab_size=313,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("target")
    return path, write_hf_model(path, CONFIG, tokenizer=False)


def random_tokens(n: int, vocab: int) -> list[int]:
    return np.random.default_rng(n).integers(0, vocab, n).tolist()


def step_of(tokens: list[int], start: int = 0, last_only: bool = False) -> ModelStepInput:
    n = len(tokens)
    mask = np.ones(n, dtype=np.int8)
    mask[: n - 1 if last_only else 0] = 0
    ids, positions = np.array(tokens, dtype=np.int64), np.arange(start, start + n)
    return ModelStepInput(ids, positions, np.zeros(n, dtype=np.int64), mask)


@pytest.mark.parametrize("draft_vocab", [None, 37])
@pytest.mark.parametrize("kind", KINDS)
def test_draft_head_equals_numpy_reference(
    tmp_path: Path, target: tuple[Path, dict[str, Any]], kind: str, draft_vocab: int | None
):
    path, weights = target
    tensors = head_tensors(kind, CONFIG, draft_vocab)
    write_head(tmp_path, CONFIG, tensors)
    embedding = weights["model.embed_tokens.weight"]
    output = tensors.get("lm_head.weight", embedding)
    rng = np.random.default_rng(1)
    n, wide = 19, 180 if kind == "eagle3" else 60
    tokens = random_tokens(n + 2, 313)
    features = rng.standard_normal((n, wide), dtype=np.float32)
    with open_checkpoint(path) as model:
        files = open_draft_head(tmp_path, model)
        assert files.kind == kind and files.config.vocab_size == (draft_vocab or 313)
        options = AdapterOptions(kv_cache_layout="slot", max_batch_tokens=8)
        adapter = DraftHeadAdapter.load(files, options)
    with adapter:
        adapter.forward_features(step_of(tokens[:n]), None, features)
        logits, hidden = adapter.logits(), adapter.hidden_states(n)
        args = (kind, CONFIG, tensors, embedding, output)
        expected = reference_head(*args, np.array(tokens[:n]), features)
        np.testing.assert_allclose(logits, expected[0], rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(hidden, expected[1], rtol=2e-4, atol=2e-5)
        # A row behind them, whose feature is its own.
        own = hidden[-1:].copy()
        adapter.forward_features(step_of(tokens[n : n + 1], n), None, own)
        further = adapter.logits()
    if kind != "eagle3":  # numpy takes features of one width
        expected = reference_head(*args, np.array(tokens[: n + 1]), np.concatenate([features, own]))
        np.testing.assert_allclose(further[0], expected[0][-1], rtol=2e-4, atol=2e-5)
    else:
        fused = np.concatenate([features @ tensors["fc.weight"].T, own])
        expected = reference_head(*args, np.array(tokens[: n + 1]), fused)
        np.testing.assert_allclose(further[0], expected[0][-1], rtol=2e-4, atol=2e-5)


def test_mtp_layer_is_found_in_the_model_files(tmp_path: Path):
    config = {**CONFIG, "model_type": "mimo", "tie_word_embeddings": False}
    tensors = head_tensors("mtp", config)
    weights = write_hf_model(tmp_path, config, tokenizer=False)
    write_head(tmp_path, config, {**weights, **tensors})
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json")
        .read_text()
        .replace('"num_hidden_layers": 1', '"num_hidden_layers": 7')
    )
    with open_checkpoint(tmp_path) as model:
        files = open_draft_head(None, model)
        assert files.kind == "mtp" and files.layers == (-1,) and files.config.num_layers == 1
        with DraftHeadAdapter.load(files, AdapterOptions(kv_cache_layout="slot")) as adapter:
            tokens, features = random_tokens(5, 313), np.ones((5, 60), dtype=np.float32)
            adapter.forward_features(step_of(tokens), None, features)
            logits = adapter.logits()
    tables = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    expected, _ = reference_head("mtp", config, tensors, *tables, np.array(tokens), features)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-5)


def test_unsuitable_draft_head_is_rejected(tmp_path: Path, target: tuple[Path, dict[str, Any]]):
    path, _ = target
    eagle3 = head_tensors("eagle3", CONFIG, 37)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (CONFIG, {"norm.weight": eagle3["norm.weight"]}, "no draft head"),
        ({**CONFIG, "hidden_size": 72}, eagle3, "hidden_size is 72; the model's is 60"),
        (CONFIG, {k: v for k, v in eagle3.items() if k != "d2t"}, "37 rows for 313 tokens"),
        (CONFIG, {**eagle3, "d2t": eagle3["d2t"] + 300}, "d2t has ids outside the 313 tokens"),
        (CONFIG, {**eagle3, "d2t": eagle3["d2t"][:5]}, r"d2t has shape \[5\], not \[37\]"),
        (CONFIG, {**eagle3, "d2t": eagle3["norm.weight"]}, "does not hold integers"),
        ({**CONFIG, "intermediate_size": 100}, eagle3, r"gate_proj.weight' has shape \[101, 60\]"),
        (CONFIG, {**eagle3, "fc.weight": eagle3["fc.weight"][:, :120]}, "takes 2 hidden states"),
    ]
    with open_checkpoint(path) as model:
        for index, (config, tensors, message) in enumerate(cases):
            directory = write_head(tmp_path / str(index), config, tensors)
            with pytest.raises(ModelLoadError, match=message):
                open_draft_head(directory, model)
        with pytest.raises(ModelLoadError):
            open_draft_head(None, model)
        given = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}
        directory = write_head(tmp_path / "good", {**CONFIG, **given}, eagle3)
        assert open_draft_head(directory, model).layers == (1, 3, 7)


def test_draft_head_checks_step_inputs(tmp_path: Path, target: tuple[Path, dict[str, Any]]):
    write_head(tmp_path, CONFIG, head_tensors("eagle3", CONFIG, 37))
    with open_checkpoint(target[0]) as model:
        files = open_draft_head(tmp_path, model)
        adapter = DraftHeadAdapter.load(files, AdapterOptions(kv_cache_layout="slot"))
    with adapter:
        step = step_of([1, 2, 3])
        with naming(InvalidInputError, "token_ids", "embd"):
            adapter.forward(step, None)
        with naming(InvalidInputError, "embd_size"):
            adapter.forward_features(step, None, np.zeros((3, 61), dtype=np.float32))
        with naming(InvalidInputError, "features"):
            adapter.forward_features(step, None, np.zeros((2, 60), dtype=np.float32))
        with naming(InvalidInputError, "token_ids[0]"):
            adapter.forward_features(step_of([313]), None, np.zeros((1, 60), dtype=np.float32))
        with pytest.raises(NativeError):
            adapter.capture_hidden_states((0,))


def test_draft_head_without_output_matrix_uses_model_rows(
    tmp_path: Path, target: tuple[Path, dict[str, Any]]
):
    path, weights = target
    tensors = head_tensors("mtp", CONFIG, 37)
    ids = tensors["d2t"] + np.arange(37)
    rows = {**tensors, "lm_head.weight": weights["model.embed_tokens.weight"][ids]}
    write_head(tmp_path / "own", CONFIG, rows)
    write_head(
        tmp_path / "models", CONFIG, {k: v for k, v in tensors.items() if k != "lm_head.weight"}
    )
    found = []
    with open_checkpoint(path) as model:
        for name in ("own", "models"):
            files = open_draft_head(tmp_path / name, model)
            assert files.config.vocab_size == 37
            with DraftHeadAdapter.load(files, AdapterOptions(kv_cache_layout="slot")) as adapter:
                features = np.ones((5, 60), dtype=np.float32)
                adapter.forward_features(step_of(random_tokens(5, 313)), None, features)
                found.append(adapter.logits().copy())
    np.testing.assert_array_equal(found[0], found[1])
