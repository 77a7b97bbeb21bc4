"""Qwen2 and Qwen2.5: biases on q, k and v; windows on some or all layers."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily

QWEN2 = DecoderFamily(
    name="qwen2", attention_bias=True, has_windows=True, gguf_pre_tokenizer="qwen2"
)
