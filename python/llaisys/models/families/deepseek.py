"""DeepSeek-V2, V2-Lite and V3, Moonlight, Kimi-K2 and GLM-4.7-Flash: latent attention with a
compressed KV cache, shared experts, dense layers first, groups of experts."""

from __future__ import annotations

import math
from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.experts import MAX_EXPERTS, ExpertNames, Experts, gguf_experts
from llaisys.models.families.latent import deepseek_latent
from llaisys.models.families.rope import MAX_FACTOR, rope_section
from llaisys.models.families.variant import Keys, RopeLayout, Sizes, Variant
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.limits import MAX_INTERMEDIATE, MAX_LAYERS


def deepseek_variant(keys: Keys, sizes: Sizes) -> Variant:
    """YaRN with `mscale_all_dim` also scales the products of values without RoPE."""
    fields, scale = keys.fields, float(sizes.head_dim**-0.5)
    if fields.boolean("attention_bias", False):
        raise fields.fail("attention_bias", "is true, which is not supported")
    if keys.arch:
        prefix = f"{keys.arch}.rope.scaling"
        factor = fields.number(f"{prefix}.factor", 1.0, MAX_FACTOR, 1.0)
        weight = fields.number(f"{prefix}.yarn_log_multiplier", 0.0, 1e3, 0.0) / 0.1
    else:
        section = rope_section(fields)
        factor = section.number("factor", 1.0, MAX_FACTOR, 1.0)
        weight = section.number("mscale_all_dim", 0.0, 1e3, 0.0)
    return Variant(attention_scale=scale * (1.0 + 0.1 * weight * math.log(factor)) ** 2)


def deepseek_layout(keys: Keys, sizes: Sizes) -> RopeLayout:
    latent = deepseek_latent(keys)
    return RopeLayout(
        rotary_dim=0 if latent is None else latent.rope_dim,
        is_interleaved=bool(keys.arch) or keys.fields.boolean("rope_interleave", True),
    )


def deepseek_v2_experts(keys: Keys, sizes: Sizes) -> Experts | None:
    """Softmax scores without renormalisation; `group_limited_greedy` selects groups first."""
    fields = keys.fields
    if keys.arch:
        return gguf_experts(keys, sizes)  # of both versions
    if fields.boolean("norm_topk_prob", False):
        raise fields.fail("norm_topk_prob", "is true, which is not supported")
    method = fields.string("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        known = "'greedy' and 'group_limited_greedy'"
        raise fields.fail("topk_method", f"is {method!r}; only {known} are supported")
    has_groups = method == "group_limited_greedy"
    return _experts(fields, sizes, has_groups, is_sigmoid=False, is_renormalised=False)


def deepseek_v3_experts(keys: Keys, sizes: Sizes) -> Experts | None:
    """Sigmoid scores, and a bias for the selection (`noaux_tc`)."""
    fields = keys.fields
    for key, supported in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        found = fields.string(key, supported)
        if found != supported:
            raise fields.fail(key, f"is {found!r}; only {supported!r} is supported")
    is_renormalised = fields.boolean("norm_topk_prob", True)
    return _experts(fields, sizes, True, is_sigmoid=True, is_renormalised=is_renormalised)


def _experts(
    fields: Fields, sizes: Sizes, has_groups: bool, is_sigmoid: bool, is_renormalised: bool
) -> Experts | None:
    count = fields.integer("n_routed_experts", 0, MAX_EXPERTS, 0)
    if fields.integer("moe_layer_freq", 1, MAX_LAYERS, 1) != 1:
        raise fields.fail("moe_layer_freq", "above 1 is not supported")
    layers = _expert_layers(fields, sizes.layers)
    if count == 0 or not layers:
        return None
    inner = fields.integer("moe_intermediate_size", 1, MAX_INTERMEDIATE)
    groups = fields.integer("n_group", 1, MAX_EXPERTS, 1) if has_groups else 1
    return Experts(
        count=count,
        used=fields.integer("num_experts_per_tok", 1, MAX_EXPERTS),
        inner=inner,
        layers=layers,
        shared_inner=inner * fields.integer("n_shared_experts", 0, MAX_EXPERTS, 0),
        is_sigmoid=is_sigmoid,
        is_renormalised=is_renormalised,
        groups=groups,
        top_groups=fields.integer("topk_group", 1, MAX_EXPERTS, 1) if has_groups else 1,
        has_score_bias=is_sigmoid,
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
    )


def _expert_layers(fields: Fields, count: int) -> tuple[int, ...]:
    """Layers with experts: those after the first dense ones, or listed in `mlp_layer_types`."""
    kinds = fields.values.get("mlp_layer_types")
    if kinds is None:
        dense = fields.integer("first_k_dense_replace", 0, MAX_LAYERS, 0)
        return tuple(range(min(dense, count), count))
    if not isinstance(kinds, list) or len(kinds) != count:
        raise fields.fail("mlp_layer_types", f"must be a list of {count} layer types")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")


DEEPSEEK_V2 = DecoderFamily(
    name="deepseek_v2",
    attention_bias=False,
    variant=deepseek_variant,
    rope_layout=deepseek_layout,
    experts=deepseek_v2_experts,
    expert_names=ExpertNames(shared="shared_experts"),
    latent=deepseek_latent,
    names=TensorNames(has_latent=True),
    defaults={
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
    experts=deepseek_v3_experts,
    has_gguf_files=False,  # they have the architecture of V2
    gguf_architecture="",
    defaults={**DEEPSEEK_V2.defaults, "first_k_dense_replace": 3},
)
KIMI_K2 = replace(DEEPSEEK_V3, name="kimi_k2")
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    defaults={**DEEPSEEK_V2.defaults, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5},
)
