"""Mistral 7B and derived models: no biases, one sliding window for all layers or none. Ministral
has full attention in some layers.

Their GGUF files have the architecture "llama".
"""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.windows import Windows, window_layers, with_layers
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.limits import MAX_POSITIONS

DEFAULT_WINDOW = 4096  # without 'sliding_window' in the config; null means no window


def one_window(fields: Fields, layers: int) -> Windows:
    """`sliding_window` applies to every layer."""
    if "sliding_window" not in fields.values:
        return DEFAULT_WINDOW, tuple(range(layers))
    window = fields.integer("sliding_window", 1, MAX_POSITIONS, None)
    return (None, ()) if window is None else (window, tuple(range(layers)))


def typed_windows(fields: Fields, layers: int) -> Windows:
    """As `one_window`, in the layers that `layer_types` names."""
    window, every = one_window(fields, layers)
    chosen = window_layers(fields, layers)
    return with_layers(window, every if chosen is None else chosen)


MISTRAL = DecoderFamily(
    name="mistral", attention_bias=False, windows=one_window, has_gguf_files=False
)
MINISTRAL = replace(MISTRAL, name="ministral", windows=typed_windows)
