"""Truncated model files are reported as truncated, at any offset."""

from __future__ import annotations

from pathlib import Path

import pytest
from error_helpers import naming
from model_files import write_gguf, write_hf_model

from llaisys.common.errors import ModelLoadError
from llaisys.models.families import open_checkpoint


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_truncated_file_error_mentions_truncation(tmp_path: Path, kind: str) -> None:
    if kind == "gguf":
        model = file = tmp_path / "model.gguf"
        write_gguf(file)
    else:
        model, file = tmp_path, tmp_path / "model.safetensors"
        write_hf_model(tmp_path)
    whole = file.read_bytes()
    open_checkpoint(model).close()
    cuts = {*range(0, 200, 7), *range(200, len(whole), len(whole) // 97), len(whole) - 1}
    for cut in sorted(cuts, reverse=True):
        file.write_bytes(whole[:cut])
        with naming(ModelLoadError, file.name):
            open_checkpoint(model)
