"""Qwen2 and Qwen2.5: the decoder with q/k/v biases."""

from __future__ import annotations

from llaisys.models.decoder import DecoderAdapter


class Qwen2Adapter(DecoderAdapter):
    model_type = "qwen2"
