"""DeepSeek and other families with latent attention."""

import math
from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.experts import ExpertFamily
from llaisys.models.families.rope import MAX_FACTOR, rope_section
from llaisys.models.families.variant import RopeLayout, Sizes, Variant
from llaisys.models.loading.fields import Fields


def deepseek_variant(fields: Fields, sizes: Sizes) -> Variant:
    """YaRN with `mscale_all_dim` also scales the products of values without RoPE."""
    if fields.arch:
        factor = fields.number("rope.scaling.factor", 1.0, MAX_FACTOR, 1.0)
        weight = fields.number("rope.scaling.yarn_log_multiplier", 0.0, 1e3, 0.0) / 0.1
    else:
        section = rope_section(fields)
        factor = section.number("factor", 1.0, MAX_FACTOR, 1.0)
        weight = section.number("mscale_all_dim", 0.0, 1e3, 0.0)
    scale = float(sizes.head_dim**-0.5) * (1.0 + 0.1 * weight * math.log(factor)) ** 2
    return Variant(attention_scale=scale)


DEEPSEEK_V2 = DecoderFamily(
    name="deepseek_v2",
    about="DeepSeek-V2, V2-Lite and V3, Moonlight, Kimi-K2 and GLM-4.7-Flash: latent attention "
    "with a compressed KV cache, shared experts, dense layers first, groups of experts.",
    attention_bias=False,
    variant=deepseek_variant,
    rope_layout=lambda fields, _: RopeLayout(
        is_interleaved=fields.boolean("rope_interleave", True)
    ),
    experts=ExpertFamily(is_renormalised=False, shared="shared_experts"),
    has_latent=True,
    unsupported=("attention_bias", "norm_topk_prob"),
    choices={"topk_method": ("greedy", "group_limited_greedy")},
    defaults={
        "topk_method": "greedy",
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rms_norm_eps": 1e-6,
    },
    gguf_architecture="deepseek2",
    gguf_pre_tokenizer="deepseek-llm",
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    experts=ExpertFamily(is_sigmoid=True, shared="shared_experts"),
    unsupported=("attention_bias",),
    choices={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
    has_gguf_files=False,  # they have the architecture of V2
    gguf_architecture="",
    defaults={**DEEPSEEK_V2.defaults, "topk_method": "noaux_tc", "first_k_dense_replace": 3},
)
KIMI_K2 = replace(DEEPSEEK_V3, name="kimi_k2")
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    defaults={**DEEPSEEK_V3.defaults, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5},
)
