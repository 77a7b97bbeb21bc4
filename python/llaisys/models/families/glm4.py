"""GLM-4: interleaved RoPE of half of a head, fused gate and up; GLM-4-0414 (`glm4`) also has norms
after attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.partial_rotary import interleaved_layout
from llaisys.models.families.variant import Keys, Sizes, Variant

# The config class of transformers has other defaults than most.
_DEFAULTS = {
    "partial_rotary_factor": 0.5,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "rms_norm_eps": 0.00000015625,
    "max_position_embeddings": 131072,
}


def glm4_variant(keys: Keys, sizes: Sizes) -> Variant:
    return Variant(norm_position="both")


GLM = DecoderFamily(
    name="glm",
    rope_layout=interleaved_layout,
    has_partial_rotary=True,
    names=TensorNames(has_fused_gate_up=True),
    defaults=_DEFAULTS,
    gguf_architecture="chatglm",
    gguf_pre_tokenizer="chatglm-bpe",
)
GLM4 = replace(
    GLM,
    name="glm4",
    variant=glm4_variant,
    names=TensorNames(
        hf={
            "self_attn.post_norm": "post_self_attn_layernorm",
            "mlp.post_norm": "post_mlp_layernorm",
        },
        has_fused_gate_up=True,
    ),
    gguf_architecture="glm4",
    gguf_pre_tokenizer="glm4",
)
