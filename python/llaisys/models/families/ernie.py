"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.experts import ExpertFamily
from llaisys.models.families.variant import RopeLayout

_DEFAULTS = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}

ERNIE4_5 = DecoderFamily(
    name="ernie4_5",
    about="ERNIE 4.5 (dense): interleaved RoPE.",
    attention_bias=False,
    rope_layout=RopeLayout(is_interleaved=True),
    defaults={**_DEFAULTS, "head_dim": 128},
    unsupported=("use_bias",),
)
ERNIE4_5_MOE = replace(
    ERNIE4_5,
    name="ernie4_5_moe",
    about="ERNIE 4.5 with experts: softmax scores with a bias for the selection, shared experts, "
    "dense layers first.",
    experts=ExpertFamily(
        inner=1536,
        has_score_bias=True,
        shared="shared_experts",
        score_bias="moe_statics.e_score_correction_bias",
        is_score_bias_row=True,
    ),
    defaults={
        **_DEFAULTS,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    gguf_architecture="ernie4_5-moe",
)
