"""Sampling defaults of known models, by name, where their files have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import model_files
import pytest

from llaisys.common.sampling import SamplingParams
from llaisys.models.families import parse_config
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.json_config import parse_generation
from llaisys.models.loading.recommended_sampling import (
    RECOMMENDED,
    gguf_model_name,
    gguf_sampling_fields,
    model_sampling,
    recommended_sampling,
)

SMOLLM2 = {"temperature": 0.2, "top_p": 0.9}


@pytest.mark.parametrize(
    "name, temperature, more",
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", 0.2, {"top_p": 0.9}),
        ("Qwen2.5 0.5B Instruct /blobs/sha256-1", 0.7, {"top_k": 20, "repetition_penalty": 1.1}),
        ("qwen2.5-coder-7b-instruct-q4_k_m.gguf", 0.7, {"repetition_penalty": 1.05}),
        ("Qwen3-0.6B-Q8_0.gguf", 0.6, {"top_k": 20, "top_p": 0.95}),
        ("Qwen3-30B-A3B-Instruct-2507-Q4_K_M.gguf", 0.7, {"top_p": 0.8}),
        ("models--meta-llama--Llama-3.2-1B-Instruct/snapshots/1/config.json", 0.6, {"top_p": 0.9}),
        ("DeepSeek-R1-Distill-Qwen-1.5B-Q4_K_M.gguf", 0.6, {"top_p": 0.95}),
        ("gemma-3-1b-it-Q4_K_M.gguf", 1.0, {"top_k": 64}),
        ("gpt-oss-20b-mxfp4.gguf", 1.0, {}),
    ],
)
def test_known_names(name: str, temperature: float, more: dict[str, float]) -> None:
    found = recommended_sampling(name)
    assert found["temperature"] == temperature and more.items() <= found.items()


@pytest.mark.parametrize("name", ["", "my-model.gguf", "Qwen3-8B-Base", "SmolLM2-135M", "llama"])
def test_other_models_have_none(name: str) -> None:
    assert recommended_sampling(name) == {}


def test_every_row_is_valid() -> None:
    for _, values in RECOMMENDED:
        SamplingParams(**values)


def test_values_in_the_files_precede_the_table() -> None:
    name = "SmolLM2-135M-Instruct"
    assert model_sampling({}, name) == SMOLLM2
    assert model_sampling({"temperature": 0.5}, name) == {"temperature": 0.5}
    assert model_sampling({"repetition_penalty": 1.2}, name) == SMOLLM2 | {
        "repetition_penalty": 1.2
    }


def test_directories_and_gguf_files(tmp_path: Path) -> None:
    def generation(**values: Any) -> dict[str, Any]:
        where = str(tmp_path / "SmolLM2-135M-Instruct" / "config.json")
        found: dict[str, Any] = parse_config(model_files.tiny_config(), values, where).generation
        return found

    assert generation() == SMOLLM2 and generation(top_k=5) == {"top_k": 5}
    metadata = Fields(
        {"general.name": "SmolLM2 135M Instruct", "general.sampling.temp": 0.75,
         "general.sampling.penalty_repeat": 1.5, "general.sampling.mirostat": 1}, "m.gguf",
    )  # fmt: skip
    assert recommended_sampling(gguf_model_name(metadata)) == SMOLLM2
    found = parse_generation(gguf_sampling_fields(metadata))
    assert found == {"temperature": 0.75, "repetition_penalty": 1.5}
