"""K-EXAONE: the attention of EXAONE 4, norms before attention and MLP, sigmoid scores with a bias
for the selection, shared experts, dense layers first."""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.exaone4 import EXAONE4, exaone4_layout, exaone4_windows
from llaisys.models.families.experts import MAX_EXPERTS, ExpertNames, Experts
from llaisys.models.families.glm4_moe import glm4_experts
from llaisys.models.families.variant import Keys, Sizes


def exaone_moe_experts(keys: Keys, sizes: Sizes) -> Experts | None:
    fields = keys.fields
    experts = glm4_experts(keys, sizes)
    if experts is None or keys.arch:
        return experts
    layers = experts.layers
    types = fields.values.get("mlp_layer_types")
    if types is not None:
        is_list = isinstance(types, list) and len(types) == sizes.layers
        if not is_list or not set(types) <= {"dense", "sparse"}:
            raise fields.fail("mlp_layer_types", f"must be {sizes.layers} of 'dense' or 'sparse'")
        layers = tuple(i for i, kind in enumerate(types) if kind == "sparse")
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    return replace(
        experts,
        count=fields.integer(name, 1, MAX_EXPERTS, 64),
        layers=layers,
        shared_inner=experts.inner * fields.integer("num_shared_experts", 0, MAX_EXPERTS, 1),
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6, 2.5),
    )


EXAONE_MOE = DecoderFamily(
    name="exaone_moe",
    attention_bias=False,
    qk_norm=True,
    windows=exaone4_windows,
    rope_layout=exaone4_layout,
    experts=exaone_moe_experts,
    expert_names=ExpertNames(shared="shared_experts", score_bias="e_score_correction_bias"),
    defaults={"rms_norm_eps": 1e-5},
    gguf_windows=EXAONE4.gguf_windows,
    gguf_architecture="exaone-moe",
    gguf_pre_tokenizer="exaone-moe",
)
