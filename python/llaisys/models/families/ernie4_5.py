"""ERNIE 4.5 (dense): interleaved RoPE."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.partial_rotary import interleaved_layout
from llaisys.models.families.variant import Keys, Sizes, Variant


def ernie_variant(keys: Keys, sizes: Sizes) -> Variant:
    if keys.boolean("use_bias", "", False):
        raise keys.fields.fail("use_bias", "is true; biases are not supported here")
    return Variant()


ERNIE4_5 = DecoderFamily(
    name="ernie4_5",
    attention_bias=False,
    variant=ernie_variant,
    rope_layout=interleaved_layout,
    default_head_dim=128,
    defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
)
