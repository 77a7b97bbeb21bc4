"""The tensors of a decoder, listed once: their names in Hugging Face's files, in GGUF files and in
the native library. A model's config says which of them it has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from llaisys.models.families.model_config import ModelConfig

_GGUF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Shard:
    """A weight of a decoder, and its bias where there is one."""

    hf: str  # name within a layer, or of the whole model, without '.weight'
    gguf: str
    slot: str  # of LlaisysDecoderWeights, without '_w'
    shape: tuple[str, ...]  # of 'hidden', 'inner', 'vocab', 'q', 'kv', 'head'
    bias: str = ""  # the switch of ModelConfig that says whether there is one
    only_if: str = ""  # the switch that says whether there is such a weight at all


_LAYER = (
    Shard("input_layernorm", "attn_norm", "attn_norm", ("hidden",)),
    Shard("self_attn.q_proj", "attn_q", "attn_q", ("q", "hidden"), "attention_bias"),
    Shard("self_attn.k_proj", "attn_k", "attn_k", ("kv", "hidden"), "attention_bias"),
    Shard("self_attn.v_proj", "attn_v", "attn_v", ("kv", "hidden"), "attention_bias"),
    Shard("self_attn.q_norm", "attn_q_norm", "attn_q_norm", ("head",), only_if="qk_norm"),
    Shard("self_attn.k_norm", "attn_k_norm", "attn_k_norm", ("head",), only_if="qk_norm"),
    Shard("self_attn.o_proj", "attn_output", "attn_o", ("hidden", "q"), "output_bias"),
    Shard("post_attention_layernorm", "ffn_norm", "mlp_norm", ("hidden",)),
    Shard("mlp.gate_proj", "ffn_gate", "mlp_gate", ("inner", "hidden")),
    Shard("mlp.up_proj", "ffn_up", "mlp_up", ("inner", "hidden")),
    Shard("mlp.down_proj", "ffn_down", "mlp_down", ("hidden", "inner")),
)
EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
FIRST_PROJECTION = "model.layers.0.self_attn.q_proj.weight"
# name -> (name in GGUF, slot)
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
        for part in _LAYER:
            if part.only_if and not getattr(config, part.only_if):
                continue
            shape = tuple(sizes[name] for name in part.shape)
            yield f"model.layers.{layer}.{part.hf}.weight", shape
            if part.bias and getattr(config, part.bias):
                yield f"model.layers.{layer}.{part.hf}.bias", shape[:1]
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield OUTPUT, (config.vocab_size, config.hidden_size)


def name_from_gguf(name: str, has_qk_norm: bool) -> str | None:
    """The Hugging Face name of a tensor of a GGUF file; None for one that there is not."""
    for hf, (gguf, _) in _GLOBAL.items():
        if name == gguf:
            return hf
    match = _GGUF_LAYER.fullmatch(name)
    if match is None:
        return None
    for part in _LAYER:
        if part.gguf == match[2] and (has_qk_norm or part.only_if != "qk_norm"):
            return f"model.layers.{match[1]}.{part.hf}.{match[3]}"
    return None


def weight_field(name: str) -> tuple[str, int]:
    """Slot of LlaisysDecoderWeights and layer of a Hugging Face tensor name."""
    if name in _GLOBAL:
        return _GLOBAL[name][1], 0
    _, _, layer, rest = name.split(".", 3)
    hf, kind = rest.rsplit(".", 1)
    return _SLOTS[hf] + ("_w" if kind == "weight" else "_b"), int(layer)


_SLOTS = {part.hf: part.slot for part in _LAYER}
