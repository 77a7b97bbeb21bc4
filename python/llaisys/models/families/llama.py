"""Llama and derived models (SmolLM2): no biases, or biases on q, k, v and o."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily

LLAMA = DecoderFamily(name="llama", output_bias=True, is_permuted_in_gguf=True)
