"""Granite and Granite MoE."""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.experts import ExpertFamily
from llaisys.models.families.variant import Sizes, Variant, scale_of
from llaisys.models.loading.fields import Fields


def granite_variant(fields: Fields, sizes: Sizes) -> Variant:
    divisor = scale_of(fields, "logits_scaling", 1.0)
    return Variant(
        embedding_scale=scale_of(fields, "embedding_multiplier", 1.0),
        residual_scale=scale_of(fields, "residual_multiplier", 1.0),
        attention_scale=scale_of(fields, "attention_multiplier", 1.0),
        logit_scale=1 / divisor if divisor else 1.0,
    )


GRANITE = DecoderFamily(
    name="granite",
    about="Granite: multipliers of embeddings, attention scores, residual stream and logits.",
    output_bias=True,
    variant=granite_variant,
    defaults={"rms_norm_eps": 1e-6},
    is_permuted_in_gguf=True,
)
GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    about="Granite MoE: Granite with a mixture of experts in every layer.",
    experts=ExpertFamily(
        block="block_sparse_moe",
        router="router.layer",
        gate_up="block_sparse_moe.input_linear.weight",
        all_down="block_sparse_moe.output_linear.weight",
    ),
    defaults={**GRANITE.defaults, "num_experts_per_tok": 2},
)
