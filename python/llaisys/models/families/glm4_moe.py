"""GLM-4.5 and GLM-4.5-Air: sigmoid scores with a bias for the selection, groups of experts, shared
experts, dense layers first, RoPE of part of a head. GGUF files of Solar Open have the same
architecture."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.experts import MAX_EXPERTS, ExpertNames, Experts, gguf_experts
from llaisys.models.families.partial_rotary import partial_layout
from llaisys.models.families.variant import Keys, Sizes
from llaisys.models.loading.limits import MAX_INTERMEDIATE, MAX_LAYERS


def glm4_experts(keys: Keys, sizes: Sizes) -> Experts | None:
    if keys.arch:
        return gguf_experts(keys, sizes, is_sigmoid=True, is_renormalised=True)
    fields = keys.fields
    name = "n_routed_experts" if fields.has("n_routed_experts") else "num_local_experts"
    inner = fields.integer("moe_intermediate_size", 1, MAX_INTERMEDIATE)
    dense = fields.integer("first_k_dense_replace", 0, MAX_LAYERS, 1)
    return Experts(
        count=fields.integer(name, 1, MAX_EXPERTS, 128),
        used=fields.integer("num_experts_per_tok", 1, MAX_EXPERTS, 8),
        inner=inner,
        layers=tuple(range(min(dense, sizes.layers), sizes.layers)),
        shared_inner=inner * fields.integer("n_shared_experts", 0, MAX_EXPERTS, 1),
        is_sigmoid=True,
        is_renormalised=fields.boolean("norm_topk_prob", True),
        groups=fields.integer("n_group", 1, MAX_EXPERTS, 1),
        top_groups=fields.integer("topk_group", 1, MAX_EXPERTS, 1),
        has_score_bias=True,
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
    )


GLM4_MOE = DecoderFamily(
    name="glm4_moe",
    qk_norm_key="use_qk_norm",
    rope_layout=partial_layout,
    has_partial_rotary=True,
    experts=glm4_experts,
    expert_names=ExpertNames(shared="shared_experts"),
    defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
    names=TensorNames(gguf={"post_attention_norm": "post_attention_layernorm"}),
    gguf_architecture="glm4moe",
    gguf_pre_tokenizer="glm4",
)
