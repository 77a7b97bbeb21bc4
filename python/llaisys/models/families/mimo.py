"""MiMo: Qwen2 with multi-token prediction layers (`mtp_layers`) for speculative decoding."""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.qwen2 import QWEN2

MIMO = replace(QWEN2, name="mimo", has_gguf_files=False)
