"""MiniMax-M2: norms of q and k over all heads of a token, RoPE of part of a head, the experts of
Mixtral with sigmoid scores and a bias for the selection."""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.experts import ExpertNames, Experts, gguf_experts, mixtral_experts
from llaisys.models.families.partial_rotary import partial_layout
from llaisys.models.families.variant import Keys, RopeLayout, Sizes, Variant


def minimax_m2_experts(keys: Keys, sizes: Sizes) -> Experts | None:
    if keys.arch:
        return gguf_experts(keys, sizes, is_sigmoid=True, is_renormalised=True)
    experts = mixtral_experts(keys, sizes)
    return None if experts is None else replace(experts, is_sigmoid=True, has_score_bias=True)


def minimax_m2_layout(keys: Keys, sizes: Sizes) -> RopeLayout:
    if not keys.arch and keys.fields.has("rotary_dim"):  # of the published files
        return RopeLayout(rotary_dim=keys.integer("rotary_dim", "", sizes.head_dim, 0))
    return partial_layout(keys, sizes)


def minimax_m2_variant(keys: Keys, sizes: Sizes) -> Variant:
    return Variant(has_row_norms=True)


MINIMAX_M2 = DecoderFamily(
    name="minimax_m2",
    attention_bias=False,
    qk_norm=True,
    variant=minimax_m2_variant,
    rope_layout=minimax_m2_layout,
    has_partial_rotary=True,
    experts=minimax_m2_experts,
    expert_names=ExpertNames(
        block="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
        score_bias="e_score_correction_bias",
    ),
    defaults={
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
    },
    gguf_architecture="minimax-m2",
    gguf_pre_tokenizer="minimax-m2",
)
