"""Helium: interleaved RoPE, its own default head size."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.partial_rotary import interleaved_layout

HELIUM = DecoderFamily(
    name="helium",
    rope_layout=interleaved_layout,
    default_head_dim=128,
    defaults={"rms_norm_eps": 1e-8, "rope_theta": 100000.0},
    has_gguf_files=False,
)
