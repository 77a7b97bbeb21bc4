"""OLMo 2: norms after attention and MLP, norms of q and k over all heads of a token."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.variant import Keys, Sizes, Variant


def olmo2_variant(keys: Keys, sizes: Sizes) -> Variant:
    return Variant(norm_position="after", has_row_norms=True)


OLMO2 = DecoderFamily(
    name="olmo2",
    output_bias=True,
    qk_norm=True,
    variant=olmo2_variant,
    names=TensorNames(
        hf={
            "self_attn.post_norm": "post_attention_layernorm",
            "mlp.post_norm": "post_feedforward_layernorm",
        }
    ),
    defaults={"rms_norm_eps": 1e-5},
)
