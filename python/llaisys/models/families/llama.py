"""Llama and derived models (SmolLM2): no biases, or biases on q, k, v and o."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.experts import mixtral_experts

LLAMA = DecoderFamily(
    name="llama", output_bias=True, is_permuted_in_gguf=True, experts=mixtral_experts
)
