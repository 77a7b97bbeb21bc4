"""GGUF models with quantised weights: close to the dequantised model, smaller in memory, and
batch-invariant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_helpers import invalid_input
from gguf_blocks import q4_k_m
from model_files import tiny_config, write_gguf, write_hf_model

from llaisys import LLM, SamplingParams
from llaisys.models.base import AdapterOptions
from llaisys.models.decoder import weight_bytes, weight_dtype
from llaisys.models.families import open_checkpoint

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
LIMITS = {"int8": 0.05, "int4": 0.4}  # of a logprob; tiny random models have large errors
PROMPTS = [[5, 9, 200, 31], [7] * 19, [1, 2, 3]]


def best_logprobs(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """{token id: logprob} of the 20 best first tokens per prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, detokenize=False)
    return [dict(output.outputs[0].logprobs[0].top) for output in llm.generate(prompts, params)]


@pytest.mark.parametrize(("model_type", "tied"), [("llama", False), ("qwen2", True)])
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_gguf_is_close_to_dequantised_model(
    kind: str, model_type: str, tied: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config(model_type, tie_word_embeddings=tied), kind=kind)
    with LLM(path, dtype="f32") as llm:
        wide = best_logprobs(llm, PROMPTS)
    with LLM(path) as llm:
        quantised = best_logprobs(llm, PROMPTS)
    for expected, got in zip(wide, quantised, strict=True):
        shared = expected.keys() & got.keys()
        assert len(shared) >= 15
        assert max(abs(expected[i] - got[i]) for i in shared) < 0.05


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_mixed_quantization_file_keeps_its_dtypes(model_type: str, tmp_path: Path) -> None:
    config = tiny_config(
        model_type, hidden_size=256, intermediate_size=256, tie_word_embeddings=True
    )
    weights = write_gguf(tmp_path / "model.gguf", config, blocks=q4_k_m)
    write_hf_model(tmp_path / "wide", config, weights=weights)
    with LLM(tmp_path / "wide") as llm:
        wide = best_logprobs(llm, PROMPTS)
    with LLM(tmp_path / "model.gguf", dtype="f32") as llm:
        assert best_logprobs(llm, PROMPTS) == wide
    with LLM(tmp_path / "model.gguf") as llm:
        quantised = best_logprobs(llm, PROMPTS)
        assert best_logprobs(llm, PROMPTS[1:2]) == quantised[1:2]
    for expected, got in zip(wide, quantised, strict=True):
        shared = expected.keys() & got.keys()
        assert len(shared) >= 15
        assert 0 < max(abs(expected[i] - got[i]) for i in shared) < 0.2
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        kinds = {checkpoint.block_type(name) for name in weights}
        assert kinds == {"Q4_K", "Q5_0", "Q6_K", None}


def test_results_are_batch_invariant(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config("qwen2"), kind="Q4_0")
    with LLM(path) as llm:
        together = best_logprobs(llm, PROMPTS * 3)
        alone = [best_logprobs(llm, [prompt])[0] for prompt in PROMPTS]
    assert together == alone * 3


def test_dtype_option_dequantises_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config("qwen2"), kind="Q4_0")
    with LLM(path) as llm:
        quantised = best_logprobs(llm, PROMPTS)
    with LLM(path, dtype="f32") as llm:
        wide = best_logprobs(llm, PROMPTS)
    differences = [
        abs(a[i] - b[i]) for a, b in zip(quantised, wide, strict=True) for i in a.keys() & b.keys()
    ]
    assert np.max(differences) > 1e-6


@pytest.mark.parametrize("source", ["f32", "f16", "bf16", "gguf"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_plain_weights_are_quantised_at_load(
    quantization: str, source: str, tmp_path: Path
) -> None:
    path = tmp_path / ("model.gguf" if source == "gguf" else "model")
    if source == "gguf":
        write_gguf(path, tiny_config("llama"), kind="F16")
    else:
        write_hf_model(path, tiny_config("qwen2"), dtype=source)
    with LLM(path, dtype="f32") as llm:
        plain = best_logprobs(llm, PROMPTS)
    with LLM(path, quantization=quantization) as llm:
        quantised = best_logprobs(llm, PROMPTS)
        assert best_logprobs(llm, PROMPTS[1:2]) == quantised[1:2]
    for expected, got in zip(plain, quantised, strict=True):
        shared = expected.keys() & got.keys()
        assert len(shared) >= 10
        assert 0 < max(abs(expected[i] - got[i]) for i in shared) < LIMITS[quantization]


def test_int4_keeps_sensitive_weights_in_8_bits(tmp_path: Path) -> None:
    config = tiny_config("qwen2", hidden_size=80, num_attention_heads=5, num_key_value_heads=1)
    write_hf_model(tmp_path, config)
    options = AdapterOptions(quantization="int4")
    with open_checkpoint(tmp_path) as checkpoint:
        layer = "model.layers.0."
        assert {
            name: weight_dtype(checkpoint, layer + name, options)
            for name in ("mlp.down_proj.weight", "mlp.up_proj.weight", "self_attn.k_proj.bias")
        } == {
            "mlp.down_proj.weight": "q8_0",
            "mlp.up_proj.weight": "f32",  # its 80 columns are not whole blocks of 32
            "self_attn.k_proj.bias": "f32",
        }
        sizes = weight_bytes(checkpoint, options)
        assert (
            sizes[layer + "mlp.down_proj.weight"] == 96 * 96 // 32 * 34
        )  # 80 rows in panels of 32
        assert sizes[layer + "mlp.up_proj.weight"] == 96 * 80 * 4


def test_quantization_without_effect_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config("qwen2"), kind="Q4_0")
    with invalid_input("quantization"):
        LLM(path, quantization="int8")
    with LLM(path, dtype="f32", quantization="int8") as llm:
        assert best_logprobs(llm, PROMPTS)
    with invalid_input("quantization"):
        LLM(path, quantization="int3")


def test_fp8_is_rejected_on_the_cpu(tmp_path: Path) -> None:
    write_hf_model(tmp_path, tiny_config("qwen2"))
    with invalid_input("quantization"):
        LLM(tmp_path, quantization="fp8", device="cpu")


def test_weights_of_a_gpu_have_other_dtypes_and_sizes(tmp_path: Path) -> None:
    write_hf_model(tmp_path, tiny_config("qwen2", hidden_size=128, intermediate_size=256))
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight",
             "model.layers.0.mlp.up_proj.weight")  # fmt: skip
    with open_checkpoint(tmp_path) as checkpoint:
        found = {
            choice: [
                weight_dtype(checkpoint, name, AdapterOptions(device="cuda", quantization=choice))
                for name in names
            ]
            for choice in ("int8", "int4", "fp8")
        }
        assert found == {
            "int8": ["q8_0", "q8_0", "q8_0"],
            "int4": ["q8_0", "q4_1", "q4_1"],
            "fp8": ["q8_0", "f8_g128", "f8_g128"],
        }
        sizes = weight_bytes(checkpoint, AdapterOptions(device="cuda", quantization="int4"))
        # 4 bits per value, 4 bytes per group of 32, rows of whole 16 bytes.
        assert sizes[names[1]] == 128 * (256 // 2 + 256 // 32 * 4)
