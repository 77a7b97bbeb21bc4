"""Tensors of a decoder: their names in Hugging Face files, GGUF files and the native library. The
config determines which of them a model has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from llaisys.models.families.model_config import ModelConfig

_GGUF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A weight of a decoder layer and its optional bias."""

    hf: str  # name within a layer, without '.weight'
    gguf: str
    field: str  # of LlaisysDecoderWeights, without '_w'
    shape: tuple[str, ...]  # of 'hidden', 'inner', 'vocab', 'q', 'kv', 'head'
    bias: str = ""  # field of ModelConfig: has a bias
    only_if: str = ""  # field of ModelConfig: has this weight


_LAYER = (
    WeightSpec("input_layernorm", "attn_norm", "attn_norm", ("hidden",)),
    WeightSpec("self_attn.q_proj", "attn_q", "attn_q", ("q", "hidden"), "attention_bias"),
    WeightSpec("self_attn.k_proj", "attn_k", "attn_k", ("kv", "hidden"), "attention_bias"),
    WeightSpec("self_attn.v_proj", "attn_v", "attn_v", ("kv", "hidden"), "attention_bias"),
    WeightSpec("self_attn.q_norm", "attn_q_norm", "attn_q_norm", ("head",), only_if="qk_norm"),
    WeightSpec("self_attn.k_norm", "attn_k_norm", "attn_k_norm", ("head",), only_if="qk_norm"),
    WeightSpec("self_attn.o_proj", "attn_output", "attn_o", ("hidden", "q"), "output_bias"),
    WeightSpec("post_attention_layernorm", "ffn_norm", "mlp_norm", ("hidden",)),
    WeightSpec("mlp.gate_proj", "ffn_gate", "mlp_gate", ("inner", "hidden")),
    WeightSpec("mlp.up_proj", "ffn_up", "mlp_up", ("inner", "hidden")),
    WeightSpec("mlp.down_proj", "ffn_down", "mlp_down", ("hidden", "inner")),
)
EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
FIRST_PROJECTION = "model.layers.0.self_attn.q_proj.weight"
# Hugging Face name -> (GGUF name, native weight field)
_GLOBAL = {
    EMBEDDING: ("token_embd.weight", "in_embed"),
    "model.norm.weight": ("output_norm.weight", "out_norm_w"),
    OUTPUT: ("output.weight", "out_embed"),
}


def tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of every tensor that the model needs, in forward order."""
    sizes = {
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "q": config.num_heads * config.head_dim,
        "kv": config.num_kv_heads * config.head_dim,
        "head": config.head_dim,
    }
    yield EMBEDDING, (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for spec in _LAYER:
            if spec.only_if and not getattr(config, spec.only_if):
                continue
            shape = tuple(sizes[name] for name in spec.shape)
            yield f"model.layers.{layer}.{spec.hf}.weight", shape
            if spec.bias and getattr(config, spec.bias):
                yield f"model.layers.{layer}.{spec.hf}.bias", shape[:1]
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield OUTPUT, (config.vocab_size, config.hidden_size)


def name_from_gguf(name: str, has_qk_norm: bool) -> str | None:
    """The Hugging Face name of a GGUF tensor; None: not part of a decoder."""
    for hf, (gguf, _) in _GLOBAL.items():
        if name == gguf:
            return hf
    match = _GGUF_LAYER.fullmatch(name)
    if match is None:
        return None
    for spec in _LAYER:
        if spec.gguf == match[2] and (has_qk_norm or spec.only_if != "qk_norm"):
            return f"model.layers.{match[1]}.{spec.hf}.{match[3]}"
    return None


def weight_field(name: str) -> tuple[str, int]:
    """(field of LlaisysDecoderWeights, layer) of a Hugging Face tensor name."""
    if name in _GLOBAL:
        return _GLOBAL[name][1], 0
    _, _, layer, rest = name.split(".", 3)
    hf, kind = rest.rsplit(".", 1)
    return _FIELDS[hf] + ("_w" if kind == "weight" else "_b"), int(layer)


_FIELDS = {spec.hf: spec.field for spec in _LAYER}
