"""OLMoE: norms of q and k over all heads of a token, experts in every layer."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.experts import MAX_EXPERTS, Experts
from llaisys.models.families.variant import Keys, Sizes, Variant
from llaisys.models.loading.limits import MAX_INTERMEDIATE


def olmoe_variant(keys: Keys, sizes: Sizes) -> Variant:
    if keys.fields.values.get("clip_qkv") is not None:
        raise keys.fields.fail("clip_qkv", "is set; clipped projections are not supported")
    return Variant(has_row_norms=True)


def olmoe_experts(keys: Keys, sizes: Sizes) -> Experts | None:
    count = keys.integer("num_local_experts", "expert_count", MAX_EXPERTS, 0)
    return Experts(
        count=count or keys.integer("num_experts", "", MAX_EXPERTS, 64),
        used=keys.integer("num_experts_per_tok", "expert_used_count", MAX_EXPERTS, 8),
        inner=keys.integer("intermediate_size", "feed_forward_length", MAX_INTERMEDIATE, 0),
        layers=tuple(range(sizes.layers)),
        is_renormalised=keys.boolean("norm_topk_prob", "", False),
    )


OLMOE = DecoderFamily(
    name="olmoe",
    output_bias=True,
    qk_norm=True,
    variant=olmoe_variant,
    experts=olmoe_experts,
    defaults={"tie_word_embeddings": False, "rms_norm_eps": 1e-5},
    gguf_pre_tokenizer="olmo",
)
