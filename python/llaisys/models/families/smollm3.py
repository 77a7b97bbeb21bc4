"""SmolLM3: every fourth layer has no RoPE."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.qwen2 import qwen_windows
from llaisys.models.families.variant import Keys, RopeLayout, Sizes

INTERVAL = 4


def smollm3_layout(keys: Keys, sizes: Sizes) -> RopeLayout:
    """`no_rope_layers`: 1 for each layer with RoPE (sic), or `no_rope_layer_interval`."""
    fields, layers = keys.fields, sizes.layers
    flags = None if keys.arch else fields.values.get("no_rope_layers")
    if flags is None:
        step = keys.integer("no_rope_layer_interval", "", 1 << 16, INTERVAL) or INTERVAL
        return RopeLayout(layers_without=tuple(range(step - 1, layers, step)))
    if not isinstance(flags, list) or len(flags) != layers:
        raise fields.fail("no_rope_layers", f"must be a list of {layers} numbers")
    return RopeLayout(layers_without=tuple(i for i, has_rope in enumerate(flags) if not has_rope))


SMOLLM3 = DecoderFamily(
    name="smollm3",
    output_bias=True,
    windows=qwen_windows,
    rope_layout=smollm3_layout,
    defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 2e6},
    is_permuted_in_gguf=True,
    gguf_pre_tokenizer="smaug-bpe",
)
