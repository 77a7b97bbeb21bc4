"""Qwen2 and Qwen2.5: biases on q, k and v; sliding windows on some or all layers."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.windows import Windows, window_layers, with_layers
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.limits import MAX_POSITIONS


def qwen_windows(fields: Fields, layers: int) -> Windows:
    """With `use_sliding_window`: layers from max_window_layers on, or those of layer_types."""
    if not fields.boolean("use_sliding_window", False):
        return None, ()
    window = fields.integer("sliding_window", 1, MAX_POSITIONS, None)
    if window is None:
        return None, ()
    chosen = window_layers(fields, layers)
    if chosen is None:
        first = fields.integer("max_window_layers", 0, MAX_POSITIONS, 28)
        chosen = tuple(range(min(first, layers), layers))
    return with_layers(window, chosen)


QWEN2 = DecoderFamily(
    name="qwen2", attention_bias=True, windows=qwen_windows, gguf_pre_tokenizer="qwen2"
)
