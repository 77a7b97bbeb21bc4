"""Qwen3: RMS norm per head of q and k, its own default head size, biases only if configured."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.qwen2 import qwen_windows

QWEN3 = DecoderFamily(
    name="qwen3",
    output_bias=True,
    qk_norm=True,
    windows=qwen_windows,
    default_head_dim=128,
    gguf_pre_tokenizer="qwen2",
)
