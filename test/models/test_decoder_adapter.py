"""The decoder adapter: loading of checkpoints, and errors for invalid ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from error_helpers import invalid_input, naming
from reference_models import (
    Piece,
    Tiny,
    make_reference,
    opened,
    random_tokens,
    reference_logits,
    run_slot,
    save,
)
from safetensors.torch import load_file, save_file

from llaisys.common.errors import ClosedError, ModelLoadError
from llaisys.models.base import AdapterOptions
from llaisys.models.decoder import DecoderAdapter
from llaisys.models.families import open_checkpoint

pytestmark = pytest.mark.parity

TINY = Tiny(layers=1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(make_reference(TINY), tmp_path)


def rewrite(directory: Path, change: object) -> None:
    """Apply `change` to the tensors of a saved model."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_dtype_option_converts_at_load(directory: Path, dtype: str) -> None:
    tokens = random_tokens(30, TINY.vocab)
    expected = reference_logits(make_reference(TINY), tokens)
    with opened(directory, kv_cache_layout="slot", max_model_len=64, dtype=dtype) as adapter:
        ours = run_slot(adapter, [Piece(0, tokens)])
    tolerance = {"f32": 2e-4, "f16": 2e-2, "bf16": 2e-1}[dtype]
    assert np.abs(ours - expected).max() < tolerance


def test_sharded_files_give_bitwise_identical_logits(tmp_path: Path) -> None:
    model = make_reference(TINY)
    model.save_pretrained(tmp_path / "whole", safe_serialization=True)
    model.save_pretrained(tmp_path / "parts", safe_serialization=True, max_shard_size="30KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    tokens = random_tokens(20, TINY.vocab)
    logits = []
    for name in ("whole", "parts"):
        with opened(tmp_path / name, kv_cache_layout="slot", max_model_len=64) as adapter:
            logits.append(run_slot(adapter, [Piece(0, tokens)]))
    np.testing.assert_array_equal(logits[0], logits[1])


def test_missing_tensor_is_named(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    with naming(ModelLoadError, "model.layers.0.mlp.up_proj.weight"):
        open_and_load(directory)


def test_misshaped_tensor_error_has_both_shapes(directory: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(TINY.hidden + 1)

    rewrite(directory, change)
    with naming(ModelLoadError, "model.norm.weight"):
        open_and_load(directory)


def test_max_model_len_beyond_the_model_is_rejected(directory: Path) -> None:
    with invalid_input("max_model_len"):
        open_and_load(directory, max_model_len=1 << 20)


def test_unknown_dtype_and_layout_are_rejected(directory: Path) -> None:
    with invalid_input("dtype"):
        open_and_load(directory, dtype="int3")
    with invalid_input("kv_cache_layout"):
        open_and_load(directory, kv_cache_layout="ring")


def test_kv_bytes_per_token(directory: Path) -> None:
    with open_checkpoint(directory) as checkpoint:
        size = DecoderAdapter.kv_bytes_per_token(checkpoint, AdapterOptions(dtype="bf16"))
    assert size == 2 * TINY.layers * TINY.kv_heads * TINY.head_dim * 2


def test_config_that_contradicts_the_weights_is_rejected(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["intermediate_size"] = TINY.intermediate + 1
    (directory / "config.json").write_text(json.dumps(config))
    with naming(ModelLoadError, "mlp"):
        open_and_load(directory)


def test_use_after_close_raises(directory: Path) -> None:
    with opened(directory, kv_cache_layout="slot", max_model_len=64) as adapter:
        adapter.close()
        adapter.close()
        with pytest.raises(ClosedError):
            run_slot(adapter, [Piece(0, [1])])


def open_and_load(directory: Path, **options: object) -> None:
    with open_checkpoint(directory) as checkpoint:
        DecoderAdapter.load(checkpoint, AdapterOptions(**options)).close()  # type: ignore[arg-type]
