"""`llaisys check-model`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_models import make_model
from reference_models import save

from llaisys.entrypoints.cli import main

pytestmark = pytest.mark.parity


def test_equal_model_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(make_model("gemma2"), tmp_path)
    assert main(["check-model", str(tmp_path), "--tokens", "13"]) == 0
    out = capsys.readouterr().out
    assert "family: gemma2, 4 layers" in out and "tensors: 46 loaded\n" in out
    for name in ("layer 0 in", "layer 3 in", "last norm", "logits"):
        assert name in out
    assert "differs" not in out and "same most likely token: 100.0 % of 13 positions" in out


def test_first_differing_layer_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from llaisys.diagnostics import check_model

    model = make_model("granite")
    save(model, tmp_path)
    reference = check_model.reference_streams

    def changed(path: Path, tokens: object, is_encoder: bool) -> check_model.Streams:
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
        save(model, tmp_path / "other")
        return reference(tmp_path / "other", tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(check_model, "reference_streams", changed)
    assert main(["check-model", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    differing = [line.split("  ")[0] for line in lines if line.endswith("differs")]
    assert differing == ["layer 2 in", "layer 3 in", "last norm", "logits", "result: differs"]


def test_without_transformers_the_model_is_run_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    save(make_model("phi3"), tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["check-model", str(tmp_path), "--dtype", "bf16"]) == 0
    out = capsys.readouterr().out
    assert "logits: finite" in out and "transformers is not installed" in out


def test_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-model"]) == 1
    assert main(["check-model", str(tmp_path), "--tokens", "0"]) == 1
    assert main(["check-model", str(tmp_path)]) == 1
    text = capsys.readouterr().err
    assert "model is None" in text and "tokens is 0" in text and "config.json is missing" in text
