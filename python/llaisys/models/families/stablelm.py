"""StableLM 2: layer norms with bias, RoPE of a quarter of a head."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.partial_rotary import partial_layout
from llaisys.models.families.variant import Keys, Sizes, Variant


def stablelm_variant(keys: Keys, sizes: Sizes) -> Variant:
    for json, gguf in (("use_parallel_residual", "use_parallel_residual"), ("qk_layernorm", "")):
        if keys.boolean(json, gguf, False):
            raise keys.fields.fail(keys.key(json, gguf), "is true; it is not supported")
    return Variant(norm="layer", norm_bias=True)


STABLELM = DecoderFamily(
    name="stablelm",
    variant=stablelm_variant,
    rope_layout=partial_layout,
    has_partial_rotary=True,
    defaults={"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
    bias_key="use_qkv_bias",
    epsilon_key="layer_norm_eps",
    gguf_pre_tokenizer="stablelm2",
)
