"""EXAONE 4 and K-EXAONE."""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.experts import ExpertFamily
from llaisys.models.families.olmo import OLMO2
from llaisys.models.families.variant import Variant
from llaisys.models.families.windows import pattern, windows

EXAONE4 = DecoderFamily(
    name="exaone4",
    about="EXAONE 4: norms after attention and MLP, norms of q and k; with windows in three of "
    "four layers, the others have no RoPE.",
    attention_bias=False,
    qk_norm=True,
    windows=windows(4096, pattern(4)),
    variant=Variant(norm_position="after"),
    has_rope_in_windows_only=True,
    names=OLMO2.names,
    defaults={"rms_norm_eps": 1e-5},
)
EXAONE_MOE = replace(
    EXAONE4,
    name="exaone_moe",
    about="K-EXAONE: the attention of EXAONE 4, norms before attention and MLP, sigmoid scores "
    "with a bias for the selection, shared experts, dense layers first.",
    variant=Variant(),
    names=TensorNames(),
    experts=ExpertFamily(
        is_sigmoid=True, shared="shared_experts", score_bias="e_score_correction_bias"
    ),
    defaults={
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    },
    gguf_architecture="exaone-moe",
    gguf_pre_tokenizer="exaone-moe",
)
