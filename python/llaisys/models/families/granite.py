"""Granite: multipliers of embeddings, attention scores, residual stream and logits."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.variant import Keys, Sizes, Variant


def granite_variant(keys: Keys, sizes: Sizes) -> Variant:
    divisor = keys.number("logits_scaling", "logit_scale", 1.0)
    return Variant(
        embedding_scale=keys.number("embedding_multiplier", "embedding_scale", 1.0),
        residual_scale=keys.number("residual_multiplier", "residual_scale", 1.0),
        attention_scale=keys.number("attention_multiplier", "attention.scale", 1.0),
        logit_scale=1 / divisor if divisor else 1.0,
    )


GRANITE = DecoderFamily(
    name="granite",
    output_bias=True,
    variant=granite_variant,
    defaults={"rms_norm_eps": 1e-6},
    is_permuted_in_gguf=True,
)
