"""config.json of transformers 4 and 5: every key is checked, errors name the key."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import model_files
import pytest
from error_helpers import naming

from llaisys.common.errors import ModelLoadError
from llaisys.models.families import FAMILIES, open_checkpoint, parse_config
from llaisys.models.families.rope import LinearRopeScaling, Llama3RopeScaling
from llaisys.models.loading.json_config import read_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(**changes: Any) -> Any:
    return parse_config(model_files.tiny_config(**changes))


def test_config_sizes_and_defaults() -> None:
    config = parse(num_key_value_heads=None, rope_theta=None)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 16)
    assert config.rope_theta == 10000.0 and config.rope_scaling is None
    assert config.attention_bias and not config.output_bias and config.dtype == "f32"
    assert parse(head_dim=32).head_dim == 32
    llama = parse_config(model_files.tiny_config("llama"))
    assert not llama.attention_bias
    biased = parse_config(model_files.tiny_config("llama", attention_bias=True))
    assert biased.attention_bias and biased.output_bias


def test_transformers_configs_are_parsed(tmp_path: Path) -> None:
    from transformers import LlamaConfig, Qwen2Config

    sizes = {k: model_files.tiny_config()[k] for k in ("hidden_size", "intermediate_size")}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2Config(
        **sizes, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ).save_pretrained(tmp_path)
    config = read_config(tmp_path, FAMILIES)[1]
    assert config.model_type == "qwen2" and config.sliding_window == 7
    assert [config.layer_window(i) for i in range(3)] == [None, 7, 7]
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}
    LlamaConfig(**sizes, rope_parameters=rope, dtype="bfloat16").save_pretrained(tmp_path)
    config = read_config(tmp_path, FAMILIES)[1]
    assert config.rope_theta == 500000.0 and config.dtype == "bf16"
    assert config.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 8192)


def test_mistral_window_applies_to_all_layers() -> None:
    def windows(**changes: Any) -> list[int | None]:
        config = parse_config(model_files.tiny_config("mistral") | changes)
        return [config.layer_window(layer) for layer in range(config.num_layers)]

    assert windows(sliding_window=7) == [7, 7] and windows(sliding_window=None) == [None, None]
    assert windows() == [4096, 4096]  # transformers' default
    assert not parse_config(model_files.tiny_config("mistral", attention_bias=True)).attention_bias
    with naming(ModelLoadError, "sliding_window"):
        windows(sliding_window=0)


def test_rope_and_dtype_keys_of_transformers_4_and_5() -> None:
    old = parse(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2}, torch_dtype="float16")
    new = parse(
        rope_theta=None,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        torch_dtype=None,
        dtype="float16",
    )
    assert old == new and old.rope_scaling == LinearRopeScaling(2.0) and old.dtype == "f16"
    assert parse(rope_scaling={"rope_type": "default"}).rope_scaling is None


def test_sliding_window_needs_use_sliding_window() -> None:
    assert parse(sliding_window=8).sliding_window is None
    on = {"sliding_window": 8, "use_sliding_window": True}
    assert parse(**on, max_window_layers=0).window_layers == (0, 1)
    assert parse(**on, max_window_layers=2).sliding_window is None
    kinds = ["sliding_attention", "full_attention"]
    assert parse(**on, layer_types=kinds).window_layers == (0,)


def test_generation_config_is_merged() -> None:
    generation = {"eos_token_id": [5, 2], "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    config = parse_config(model_files.tiny_config(eos_token_id=[2, 9]), generation)
    assert config.eos_token_ids == (5, 2, 9) and config.bos_token_id == 1
    assert config.generation == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    greedy = parse_config(model_files.tiny_config(), {"do_sample": False, "top_p": 0.0})
    assert greedy.generation == {"temperature": 0.0}
    typical = parse_config(model_files.tiny_config(), {"typical_p": 0.9, "min_p": 0.1})
    assert typical.generation == {"typical_p": 0.9, "min_p": 0.1}


REQUIRED = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("intermediate_size", "rms_norm_eps", "max_position_embeddings"),
)


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(key: str) -> None:
    with naming(ModelLoadError, key):
        parse_config({**model_files.tiny_config(), key: None})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be an integer from 1 to 131072"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0; it must be an integer"),
        ({"hidden_size": True}, "hidden_size is True; it must be an integer"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be"),
        ({"hidden_size": 10**30}, "hidden_size is 1000"),
        ({"vocab_size": 10**5000}, "vocab_size is an integer of"),
        (
            {"num_hidden_layers": 10**6},
            "num_hidden_layers is 1000000; it must be an integer from 1 to 1024",
        ),
        ({"hidden_size": 66}, "not a multiple of 4 heads"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_scaling": {"type": "spiral"}}, "'spiral' is not supported; known: default"),
        ({"rope_scaling": {"type": "longrope"}}, "short_factor must be a list of 8 numbers"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "low_freq_factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling is [1]; it must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "per layer type"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"eos_token_id": 320}, "eos_token_id is 320; it must be an integer from 0 to 319"),
        ({"eos_token_id": ["a"]}, "eos_token_id[0] is 'a'; it must be an integer"),
        ({"model_type": "gpt9"}, "unknown architecture 'gpt9'; known: bert, cohere, cohere2, "),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "bits is missing"),
        ({"quantization_config": GPTQ | {"bits": 3}}, "bits is 3; gptq is read with 4 or 8"),
        (
            {"quantization_config": GPTQ | {"checkpoint_format": "marlin"}},
            "checkpoint_format is 'marlin'; known: gptq",
        ),
        (
            {"quantization_config": GPTQ | {"quant_method": "awq", "version": "gemv"}},
            "version is 'gemv'; only 'gemm'",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "dense"}},
            "format is 'dense'; known: pack-quantized",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["x"]},
            "layer_types must be",
        ),
        (
            {"hidden_size": 1 << 17, "intermediate_size": 1 << 20, "num_hidden_layers": 1024},
            "parameters, more than",
        ),
    ],
)
def test_invalid_value_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse(**changes)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"a": ' + b"[" * 100_000, b"\xff\xfe", b"1" * 10_000, b"null"]
)
def test_damaged_config_is_a_load_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with naming(ModelLoadError, "config.json"):
        open_checkpoint(tmp_path)


def test_code_in_model_directory_is_never_imported(tmp_path: Path) -> None:
    config = model_files.tiny_config(auto_map={"AutoConfig": "payload.Config"})
    model_files.write_hf_model(tmp_path, config)
    marker = tmp_path / "ran"
    (tmp_path / "payload.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\n")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["payload.Config", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    from llaisys.tokenization import Tokenizer

    with open_checkpoint(tmp_path) as checkpoint:
        Tokenizer.from_source(checkpoint.tokenizer_source)
    assert not marker.exists() and "payload" not in sys.modules
