"""gpt-oss: attention sinks, windows in every second layer, YaRN, a mixture of experts with biases
and a clamped SwiGLU, experts in MXFP4."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.experts import MAX_EXPERTS, ExpertNames, Experts
from llaisys.models.families.variant import Keys, Sizes, Variant
from llaisys.models.families.windows import gguf_pattern_windows, pattern_windows
from llaisys.models.loading.limits import MAX_INTERMEDIATE

_WINDOW, _PATTERN = 128, 2


def gpt_oss_variant(keys: Keys, sizes: Sizes) -> Variant:
    return Variant(has_sinks=True)


def gpt_oss_experts(keys: Keys, sizes: Sizes) -> Experts | None:
    inner = "expert_feed_forward_length"
    return Experts(
        count=keys.integer("num_local_experts", "expert_count", MAX_EXPERTS, 128),
        used=keys.integer("num_experts_per_tok", "expert_used_count", MAX_EXPERTS, 4),
        inner=keys.integer("intermediate_size", inner, MAX_INTERMEDIATE, 2880),
        layers=tuple(range(sizes.layers)),
        has_bias=True,
        limit=keys.number("swiglu_limit", "", 7.0),
        alpha=keys.number("swiglu_alpha", "", 1.702),
    )


GPT_OSS = DecoderFamily(
    name="gpt_oss",
    output_bias=True,
    windows=pattern_windows(_WINDOW, _PATTERN),
    gguf_windows=gguf_pattern_windows(_PATTERN),
    variant=gpt_oss_variant,
    experts=gpt_oss_experts,
    expert_names=ExpertNames(router="router", is_interleaved=True),
    names=TensorNames(
        hf={"self_attn.post_norm": "post_attention_layernorm"},
        has_sinks=True,
    ),
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    truncates_yarn=False,
    gguf_architecture="gpt-oss",
)
