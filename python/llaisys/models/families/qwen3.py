"""Qwen3: norms over the heads of q and k, a head size of its own, no biases unless it says so."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily

QWEN3 = DecoderFamily(
    name="qwen3",
    output_bias=True,
    qk_norm=True,
    has_windows=True,
    default_head_dim=128,
    gguf_pre_tokenizer="qwen2",
)
