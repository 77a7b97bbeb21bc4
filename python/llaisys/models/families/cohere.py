"""Command R (`cohere`) and Command R7B / Command A (`cohere2`)."""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.variant import RopeLayout, Sizes, Variant, scale_of
from llaisys.models.families.windows import pattern, windows
from llaisys.models.loading.fields import Fields


def cohere_variant(fields: Fields, sizes: Sizes) -> Variant:
    scale = scale_of(fields, "logit_scale", 0.0625)
    return Variant(norm="layer", is_parallel=True, logit_scale=scale)


COHERE = DecoderFamily(
    name="cohere",
    about="Command R (`cohere`) and Command R7B / Command A (`cohere2`): attention and MLP in "
    "parallel, a layer norm without bias, interleaved RoPE, scaled logits. Cohere 2 has windows in "
    "three of four layers and no RoPE in the others.",
    output_bias=True,
    variant=cohere_variant,
    rope_layout=RopeLayout(is_interleaved=True),
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "rope_theta": 500000.0},
    unsupported=("use_qk_norm",),
    epsilon_key="layer_norm_eps",
    gguf_architecture="command-r",
    gguf_pre_tokenizer="command-r",
)
COHERE2 = replace(
    COHERE,
    name="cohere2",
    windows=windows(4096, pattern(4)),
    has_rope_in_windows_only=True,
    defaults={**COHERE.defaults, "rope_theta": 10000.0},
    gguf_architecture="cohere2",
)
