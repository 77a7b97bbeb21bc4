"""Solar Open: the experts of GLM-4.5 in every layer, the attention of Llama."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.experts import ExpertNames
from llaisys.models.families.glm4_moe import glm4_experts

SOLAR_OPEN = DecoderFamily(
    name="solar_open",
    experts=glm4_experts,
    expert_names=ExpertNames(shared="shared_experts"),
    defaults={
        "first_k_dense_replace": 0,
        "intermediate_size": 1,  # no layer has a dense MLP
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    has_gguf_files=False,  # they have the architecture of GLM-4.5
)
