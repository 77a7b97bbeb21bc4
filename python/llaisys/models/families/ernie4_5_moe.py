"""ERNIE 4.5 with experts: softmax scores with a bias for the selection, shared experts, dense
layers first."""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.ernie4_5 import ERNIE4_5
from llaisys.models.families.experts import MAX_EXPERTS, ExpertNames, Experts, gguf_experts
from llaisys.models.families.variant import Keys, Sizes
from llaisys.models.loading.limits import MAX_INTERMEDIATE, MAX_LAYERS


def ernie_experts(keys: Keys, sizes: Sizes) -> Experts | None:
    fields = keys.fields
    if keys.arch:
        found = gguf_experts(keys, sizes, is_renormalised=True)
        step = keys.integer("", "interleave_moe_layer_step", MAX_LAYERS, 1) or 1
        if found is None:
            return None
        chosen = tuple(i for i in found.layers if (i + 1) % step == 0)
        return replace(found, layers=chosen, has_score_bias=True)
    inner = fields.integer("moe_intermediate_size", 1, MAX_INTERMEDIATE, 1536)
    first = fields.integer("moe_layer_start_index", 0, MAX_LAYERS, 1)
    last = fields.integer("moe_layer_end_index", -1, MAX_LAYERS, -1)
    step = fields.integer("moe_layer_interval", 1, MAX_LAYERS, 1)
    last = sizes.layers - 1 if last == -1 else last
    layers = (i for i in range(sizes.layers) if first <= i <= last and (i + 1) % step == 0)
    return Experts(
        count=fields.integer("moe_num_experts", 1, MAX_EXPERTS, 64),
        used=fields.integer("moe_k", 1, MAX_EXPERTS, 6),
        inner=inner,
        layers=tuple(layers),
        shared_inner=inner * fields.integer("moe_num_shared_experts", 0, MAX_EXPERTS, 2),
        has_score_bias=True,
    )


ERNIE4_5_MOE = replace(
    ERNIE4_5,
    name="ernie4_5_moe",
    experts=ernie_experts,
    expert_names=ExpertNames(
        shared="shared_experts",
        score_bias="moe_statics.e_score_correction_bias",
        is_score_bias_row=True,
    ),
    default_head_dim=None,
    gguf_architecture="ernie4_5-moe",
)
