"""Command R (`cohere`) and Command R7B / Command A (`cohere2`): attention and MLP in parallel, a
layer norm without bias, interleaved RoPE, scaled logits. Cohere 2 has windows in three of four
layers and no RoPE in the others."""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.variant import Keys, RopeLayout, Sizes, Variant
from llaisys.models.families.windows import gguf_pattern_windows, pattern_windows

_WINDOW, _PATTERN = 4096, 4


def cohere_variant(keys: Keys, sizes: Sizes) -> Variant:
    if not keys.arch and keys.boolean("use_qk_norm", "", False):
        raise keys.fields.fail("use_qk_norm", "is true; norms of q and k are not supported here")
    return Variant(
        norm="layer",
        is_parallel=True,
        logit_scale=keys.number("logit_scale", "logit_scale", 0.0625),
    )


def cohere_layout(keys: Keys, sizes: Sizes) -> RopeLayout:
    return RopeLayout(is_interleaved=True)


def cohere2_layout(keys: Keys, sizes: Sizes) -> RopeLayout:
    """Only layers with a window have RoPE."""
    if keys.arch:
        key = f"{keys.arch}.attention.sliding_window"
        _, chosen = gguf_pattern_windows(_PATTERN)(keys.fields, key, sizes.layers)
    else:
        _, chosen = pattern_windows(_WINDOW, _PATTERN)(keys.fields, sizes.layers)
    without = tuple(i for i in range(sizes.layers) if i not in chosen)
    return RopeLayout(is_interleaved=True, layers_without=without)


COHERE = DecoderFamily(
    name="cohere",
    output_bias=True,
    variant=cohere_variant,
    rope_layout=cohere_layout,
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "rope_theta": 500000.0},
    epsilon_key="layer_norm_eps",
    gguf_architecture="command-r",
    gguf_pre_tokenizer="command-r",
)
COHERE2 = replace(
    COHERE,
    name="cohere2",
    windows=pattern_windows(_WINDOW, _PATTERN),
    gguf_windows=gguf_pattern_windows(_PATTERN),
    rope_layout=cohere2_layout,
    defaults={**COHERE.defaults, "rope_theta": 10000.0},
    gguf_architecture="cohere2",
)
