"""Seed-OSS: biases on q, k and v, its own default head size."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.variant import Keys, Sizes, Variant


def seed_oss_variant(keys: Keys, sizes: Sizes) -> Variant:
    if keys.boolean("attention_out_bias", "", False):
        raise keys.fields.fail("attention_out_bias", "is true; it is not supported")
    return Variant()


SEED_OSS = DecoderFamily(
    name="seed_oss",
    variant=seed_oss_variant,
    default_head_dim=128,
    defaults={"attention_bias": True, "rms_norm_eps": 1e-6},
    names=TensorNames(gguf={"post_attention_norm": "post_attention_layernorm"}),
    gguf_pre_tokenizer="seed-coder",
)
