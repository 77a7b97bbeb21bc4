"""Llama and derived models (SmolLM2): no biases, or biases on q, k, v and o."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.experts import Experts, mixtral_experts
from llaisys.models.families.variant import Keys, Sizes


def llama_experts(keys: Keys, sizes: Sizes) -> Experts | None:
    """GGUF files of Mixtral have the architecture of Llama."""
    return mixtral_experts(keys, sizes) if keys.arch else None


LLAMA = DecoderFamily(
    name="llama", output_bias=True, is_permuted_in_gguf=True, experts=llama_experts
)
