"""Llama and its relatives (SmolLM2): no biases, or on all four projections of attention."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily

LLAMA = DecoderFamily(name="llama", output_bias=True, is_permuted_in_gguf=True)
