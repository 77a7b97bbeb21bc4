"""Llama and its relatives (SmolLM2): the decoder without biases."""

from __future__ import annotations

from llaisys.models.decoder import DecoderAdapter


class LlamaAdapter(DecoderAdapter):
    model_type = "llama"
