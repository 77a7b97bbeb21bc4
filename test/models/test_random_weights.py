"""Models without weight files: config.json with `random_weights`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from error_helpers import naming
from model_files import tiny_config, write_tiny_tokenizer

from llaisys import LLM, SamplingParams
from llaisys.common.errors import ModelLoadError
from llaisys.models.base import AdapterOptions
from llaisys.models.decoder import weight_dtype
from llaisys.models.families import open_checkpoint

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, detokenize=False)


def write(directory: Path, kind: object, model_type: str = "llama") -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "torch_dtype": "bfloat16"}
    config = {**tiny_config(model_type, **sizes), "random_weights": kind}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    ("kind", "quantization"),
    [("plain", None), ("plain", "int4"), ("i4_g128", None), ("f8_g128", None)],
)
def test_a_model_without_files_runs(
    kind: str, quantization: str | None, model_type: str, tmp_path: Path
) -> None:
    model = write(tmp_path, kind, model_type)
    with LLM(str(model), device="cpu", quantization=quantization, num_kv_blocks=20) as llm:
        tokens = [output.token_ids for output in llm.generate([[1, 2, 3]] * 2, GREEDY)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 4


def test_a_tokenizer_beside_the_config_is_used(tmp_path: Path) -> None:
    directory = write(tmp_path, "plain")
    write_tiny_tokenizer(directory)
    with LLM(str(directory), device="cpu", num_kv_blocks=20) as llm:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        assert llm.generate(["abc"], params)[0].text


def test_linear_weights_have_the_blocks(tmp_path: Path) -> None:
    layer = "model.layers.0.self_attn.q_proj.weight"
    gpu = AdapterOptions(device="cuda")
    with open_checkpoint(write(tmp_path, "f8_g128")) as checkpoint:
        assert weight_dtype(checkpoint, layer, gpu) == "f8_g128"
        assert weight_dtype(checkpoint, "model.embed_tokens.weight", gpu) == "bf16"
        assert weight_dtype(checkpoint, "model.norm.weight", gpu) == "f32"


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with naming(ModelLoadError, "random_weights", "q3_x"):
        open_checkpoint(write(tmp_path, "q3_x"))
