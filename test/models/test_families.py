"""Model families: Hugging Face and GGUF tensor names, shapes, weight fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import model_files
import numpy as np
import pytest

from llaisys.common.errors import ModelLoadError
from llaisys.common.model_registry import MODEL_REGISTRY
from llaisys.libllaisys.types import LlaisysDecoderWeights
from llaisys.models.families import FAMILIES, open_checkpoint, parse_config
from llaisys.models.families.decoder_tensors import weight_field
from llaisys.models.loading.checkpoint import check_coverage

SLOTS = {name for name, _ in LlaisysDecoderWeights._fields_}


ACTIVATIONS = dict.fromkeys(("gemma", "vaultgemma", "starcoder2"), "gelu_pytorch_tanh")
ACTIVATIONS |= dict.fromkeys(("bert", "roberta", "xlm-roberta"), "gelu")


def config_of(name: str) -> Any:
    act = next((act for start, act in ACTIVATIONS.items() if name.startswith(start)), "silu")
    config = model_files.tiny_config(name, hidden_act=act, head_dim=16, tie_word_embeddings=True)
    if FAMILIES[name].experts is not None:
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return parse_config(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_has_a_weight_field_and_a_gguf_name(name: str) -> None:
    """The names of the gguf package lead to the tensors that the family reads."""
    family = FAMILIES[name]
    config = config_of(name)
    used, sources = set(), {}
    for tensor, shape in family.tensors(config):
        slot, layer = weight_field(tensor)
        assert slot in SLOTS and 0 <= layer < config.num_layers
        assert (slot, layer) not in used and shape and all(size > 0 for size in shape)
        used.add((slot, layer))
        source = family.source(tensor, config, is_gguf=True).name
        # Encoders have the names of the gguf package in their own files.
        sources[source] = family.source(tensor, config, config.encoder is None).name
    if getattr(family, "has_gguf_files", True):
        code = {name: code for code, name in gguf.MODEL_ARCH_NAMES.items()}[family.architecture()]
        names = gguf.get_tensor_name_map(code, config.num_layers)
        for source, named in sources.items():
            hf = named.replace("mlp.gate_score.", "mlp.gate.e_score_correction.")
            target = names.get_name(hf, try_suffixes=(".weight", ".bias"))
            assert target is not None and family.name_from_gguf(target) == source


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_registered_everywhere(name: str) -> None:
    assert FAMILIES[name].name == name
    assert name in MODEL_REGISTRY


def test_unknown_gguf_tensors_have_no_name() -> None:
    for family in FAMILIES.values():
        for name in (
            "blk.0.ffn_gate_chexps.weight",
            "blk.x.attn_q.weight",
        ):
            assert family.name_from_gguf(name) is None
        has_sinks = family.name_from_gguf("blk.0.attn_sinks.weight") is not None
        assert has_sinks is (family.name == "gpt_oss")
    for name in (
        "blk.0.attn_q_norm.weight",
        "blk.0.attn_qkv.weight",
        "blk.0.ffn_gate_exps.weight",
    ):
        assert FAMILIES["qwen2"].name_from_gguf(name) is None


def test_gguf_files_of_llama_and_three_more_are_permuted() -> None:
    config = parse_config(model_files.tiny_config("llama"))
    name = "model.layers.0.self_attn.{}_proj.weight"
    found = {f: FAMILIES[f].permuted_heads(name.format("q"), config) for f in FAMILIES}
    permuted = [found.pop(name) for name in ("llama", "granite", "granitemoe", "smollm3")]
    assert permuted == [4, 4, 4, 4] and set(found.values()) == {None}
    assert FAMILIES["llama"].permuted_heads(name.format("k"), config) == 2
    assert FAMILIES["llama"].permuted_heads(name.format("v"), config) is None


@pytest.mark.parametrize(
    ("name", "nearest"), [("gemma9", "gemma"), ("qwen2_audio", "qwen2_moe"), ("Phi3", "phi3")]
)
def test_unknown_family_error_names_the_known_the_nearest_and_the_guide(
    name: str, nearest: str
) -> None:
    words = (
        rf"f: unknown architecture '{name}'; known: bert, .*qwen2.*; nearest: {nearest}[0-9]*; "
        r"to add one: docs/internals/adding_a_model\.md"
    )
    with pytest.raises(ModelLoadError, match=words):
        parse_config({"model_type": name}, where="f")
    assert (Path(__file__).parents[2] / "docs/internals/adding_a_model.md").is_file()


def test_unknown_family_without_a_similar_name() -> None:
    with pytest.raises(ModelLoadError):
        parse_config({"model_type": "x"}, where="f")


def test_language_model_of_a_multimodal_model_loads_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = model_files.tiny_config("qwen2_5_vl_text", torch_dtype=None)
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    whole = {
        "model_type": "qwen2_5_vl", "text_config": text, "vision_config": {"depth": 2},
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    with caplog.at_level("WARNING", logger="llaisys.models"):
        config = parse_config(whole, where="f")
        flat = parse_config({**text, "model_type": "qwen2_5_vl"}, where="f")
    assert config.model_type == flat.model_type == "qwen2" and config.dtype == "bf16"
    assert "only the language model of this qwen2_5_vl model is loaded" in caplog.text
    assert "ignored: vision_config" in caplog.text


def test_tensors_of_a_language_model_are_found_under_its_prefix(tmp_path: Path) -> None:
    text = model_files.tiny_config("qwen2")
    whole = {"model_type": "llava", "text_config": text, "vision_config": {}}
    weights = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in model_files.tiny_weights(text).items()
    }
    weights["model.visual.patch_embed.weight"] = weights["lm_head.weight"]
    model_files.write_hf_model(tmp_path, whole, weights=weights)
    with open_checkpoint(tmp_path) as checkpoint:
        names = check_coverage(checkpoint)
        assert names[0] == "model.embed_tokens.weight"
        assert checkpoint.shape("model.norm.weight") == (64,)
        expected = weights["model.language_model.norm.weight"]
        np.testing.assert_array_equal(checkpoint.read("model.norm.weight", "f32"), expected)
