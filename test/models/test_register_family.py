"""Families outside the package: `llaisys.register_family` and entry points."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import model_files
import pytest
from error_helpers import naming

import llaisys
from llaisys import LLM, SamplingParams
from llaisys.common import model_registry
from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.models import families
from llaisys.models.families.llama import LLAMA

FAMILY = replace(LLAMA, name="my_llama")
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_registry, "MODEL_REGISTRY", dict(model_registry.MODEL_REGISTRY))
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    monkeypatch.setattr(families, "loaded_plugins", set())


def write(folder: Path, model_type: str) -> Path:
    config = model_files.tiny_config("llama")
    model_files.write_hf_model(folder, config)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    return folder


def tokens(path: Path) -> list[int]:
    with LLM(path, num_kv_blocks=8) as llm:
        (found,) = llm.generate([[1, 2, 3]], GREEDY)
    return list(found.token_ids)


def register() -> None:
    llaisys.register_family(FAMILY)


def test_registered_family_runs_like_the_one_it_copies(tmp_path: Path) -> None:
    register()
    assert tokens(write(tmp_path / "my", "my_llama")) == tokens(write(tmp_path / "llama", "llama"))
    with pytest.raises(InvalidInputError):
        register()


def test_entry_point_is_called_for_an_unknown_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("my_llama", f"{__name__}:register", families.PLUGINS)
    asked: list[Any] = []

    def entry_points(group: str) -> list[EntryPoint]:
        asked.append(group)
        return [point]

    monkeypatch.setattr(families, "entry_points", entry_points)
    with families.open_checkpoint(write(tmp_path / "llama", "llama")):
        assert asked == []  # a known family loads no plugin
    with families.open_checkpoint(write(tmp_path / "my", "my_llama")) as checkpoint:
        assert checkpoint.config.model_type == "my_llama"
    assert asked == [families.PLUGINS]
    with naming(ModelLoadError, "'other'"):
        families.open_checkpoint(write(tmp_path / "other", "other"))
