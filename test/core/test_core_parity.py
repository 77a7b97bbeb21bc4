"""The decoder against transformers, logit by logit, on tiny random models."""

from __future__ import annotations

from pathlib import Path

import model_files
import numpy as np
import pytest
import torch
from reference_models import (
    BLOCK,
    Piece,
    Tiny,
    make_reference,
    opened,
    random_tokens,
    reference_logits,
    run_block,
    run_slot,
    save,
)

pytestmark = pytest.mark.parity

MODELS = {
    "qwen2": Tiny(),
    "qwen2-tied": Tiny(tied=True, heads=4, kv_heads=4, head_dim=14),
    "qwen2-one-kv-head": Tiny(heads=7, kv_heads=1, head_dim=18, hidden=77, intermediate=203),
    "qwen2-window": Tiny(window=7),
    "qwen2-window-on-some-layers": Tiny(window=7, full_layers=2),
    "qwen3": Tiny(kind="qwen3", head_dim=14),
    "qwen3-tied-window": Tiny(kind="qwen3", tied=True, head_dim=18, window=9, full_layers=1),
    "llama": Tiny(kind="llama"),
    "mistral-window": Tiny(kind="mistral", window=7, head_dim=14),
    "mistral": Tiny(kind="mistral", tied=True),
}
F32_TOLERANCE = 2e-4


@pytest.mark.parametrize("name", MODELS)
def test_f32_logits_match_transformers_at_every_position(name: str, tmp_path: Path) -> None:
    tiny = MODELS[name]
    model = make_reference(tiny)
    save(model, tmp_path)
    tokens = random_tokens(97, tiny.vocab)
    with opened(tmp_path, kv_cache_layout="slot", max_model_len=128) as adapter:
        ours = run_slot(adapter, [Piece(0, tokens)])
    assert np.abs(ours - reference_logits(model, tokens)).max() < F32_TOLERANCE


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_f32_logits_match_transformers_over_2000_positions(kind: str, tmp_path: Path) -> None:
    tiny = Tiny(kind=kind, layers=2)
    model = make_reference(tiny)
    save(model, tmp_path)
    tokens = random_tokens(2000, tiny.vocab)
    with opened(tmp_path, kv_cache_layout="slot", max_model_len=2048) as adapter:
        ours = run_slot(adapter, [Piece(0, tokens)])
    difference = np.abs(ours - reference_logits(model, tokens)).max(axis=1)
    assert difference.max() < F32_TOLERANCE, f"worst at position {difference.argmax()}"


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_16_bit_models_are_as_accurate_as_transformers(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    torch_dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    tiny = Tiny(kind=kind)
    # The reference has the rounded weights, so that only the arithmetic differs.
    exact = make_reference(tiny).to(torch_dtype).to(torch.float32)
    save(exact, tmp_path, torch_dtype)
    tokens = random_tokens(200, tiny.vocab)
    expected = reference_logits(exact, tokens)
    theirs = reference_logits(exact.to(torch_dtype), tokens)
    with opened(tmp_path, kv_cache_layout="slot", max_model_len=256) as adapter:
        ours = run_slot(adapter, [Piece(0, tokens)])
    rms_ours = float(np.sqrt(np.mean((ours - expected) ** 2)))
    rms_theirs = float(np.sqrt(np.mean((theirs - expected) ** 2)))
    assert rms_ours <= 1.5 * rms_theirs, f"ours {rms_ours}, transformers {rms_theirs}"


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_greedy_decoding_matches_transformers(kind: str, tmp_path: Path) -> None:
    """Greedy continuation of three prompts in one batch, one token per step."""
    tiny = Tiny(kind=kind)
    model = make_reference(tiny, seed=3)
    save(model, tmp_path)
    prompts = [random_tokens(n, tiny.vocab, seed=n) for n in (1, 17, 33)]
    new_tokens = 24
    expected = [
        model.generate(
            torch.tensor([p]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
        )[0].tolist()[len(p) :]
        for p in prompts
    ]
    blocks = {i: list(range(8 * i, 8 * i + 8)) for i in range(3)}
    with opened(tmp_path, kv_cache_capacity_tokens=24 * BLOCK, max_model_len=128) as adapter:
        pieces = [Piece(i, p) for i, p in enumerate(prompts)]
        sequences: list[list[int]] = [[] for _ in prompts]
        for _ in range(new_tokens):
            logits = run_block(adapter, pieces, blocks)
            ends = np.cumsum([len(p.tokens) for p in pieces]) - 1
            sampled = logits[ends].argmax(axis=1).tolist()
            for sequence, token in zip(sequences, sampled, strict=True):
                sequence.append(token)
            pieces = [
                Piece(i, [token], piece.start + len(piece.tokens))
                for i, (piece, token) in enumerate(zip(pieces, sampled, strict=True))
            ]
    assert sequences == expected


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_gguf_file_and_directory_give_the_same_logits(kind: str, tmp_path: Path) -> None:
    """Both file formats have the same weights: names, order of rows and head size match."""
    head_dim = {"head_dim": 24} if kind == "qwen3" else {}
    config = model_files.tiny_config(kind, **head_dim)
    model_files.write_hf_model(tmp_path / "hf", config)
    model_files.write_gguf(tmp_path / "m.gguf", config)
    tokens = random_tokens(40, config["vocab_size"])
    found = []
    for path in (tmp_path / "hf", tmp_path / "m.gguf"):
        with opened(path, kv_cache_layout="slot", max_model_len=64) as adapter:
            found.append(run_slot(adapter, [Piece(0, tokens)]))
    np.testing.assert_array_equal(found[0], found[1])
