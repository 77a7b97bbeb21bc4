"""Model families: Hugging Face and GGUF tensor names, shapes, weight fields."""

from __future__ import annotations

import model_files
import pytest

from llaisys.common.errors import ModelLoadError
from llaisys.common.model_registry import MODEL_REGISTRY
from llaisys.libllaisys.decoder import LlaisysDecoderWeights
from llaisys.models.families import FAMILIES, parse_config
from llaisys.models.families.decoder_tensors import weight_field

SLOTS = {name for name, _ in LlaisysDecoderWeights._fields_}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_has_a_weight_field_and_a_gguf_name(name: str) -> None:
    family = FAMILIES[name]
    config = parse_config(model_files.tiny_config(name))
    used = set()
    for tensor, shape in family.tensors(config):
        slot, layer = weight_field(tensor)
        assert slot in SLOTS and 0 <= layer < config.num_layers
        assert (slot, layer) not in used and shape and all(size > 0 for size in shape)
        used.add((slot, layer))
        assert family.name_from_gguf(model_files.gguf_name(tensor)) == tensor


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_registered_everywhere(name: str) -> None:
    assert FAMILIES[name].name == name
    assert name in MODEL_REGISTRY


def test_unknown_gguf_tensors_have_no_name() -> None:
    for family in FAMILIES.values():
        for name in ("blk.0.ffn_gate_exps.weight", "blk.0.attn_qkv.weight", "blk.x.attn_q.weight"):
            assert family.name_from_gguf(name) is None
    assert FAMILIES["qwen2"].name_from_gguf("blk.0.attn_q_norm.weight") is None


def test_only_llama_gguf_files_are_permuted() -> None:
    config = parse_config(model_files.tiny_config("llama"))
    name = "model.layers.0.self_attn.{}_proj.weight"
    found = {f: FAMILIES[f].permuted_heads(name.format("q"), config) for f in FAMILIES}
    assert found.pop("llama") == 4 and set(found.values()) == {None}
    assert FAMILIES["llama"].permuted_heads(name.format("k"), config) == 2
    assert FAMILIES["llama"].permuted_heads(name.format("v"), config) is None


def test_unknown_family_error_lists_known_families() -> None:
    known = r"f: unknown architecture 'gpt9'; known: llama, .*qwen2"
    with pytest.raises(ModelLoadError, match=known):
        parse_config({"model_type": "gpt9"}, where="f")
