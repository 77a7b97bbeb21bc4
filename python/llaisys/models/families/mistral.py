"""Mistral 7B and its relatives: no biases, one window for all layers or none.

Their GGUF files say that they are llama ones.
"""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily, Windows
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.limits import MAX_POSITIONS

UNSAID_WINDOW = 4096  # of a config without the key; null means that there is no window


def one_window(fields: Fields, layers: int) -> Windows:
    """`sliding_window` is that of every layer."""
    if "sliding_window" not in fields.values:
        return UNSAID_WINDOW, tuple(range(layers))
    window = fields.integer("sliding_window", 1, MAX_POSITIONS, None)
    return (None, ()) if window is None else (window, tuple(range(layers)))


MISTRAL = DecoderFamily(
    name="mistral", attention_bias=False, windows=one_window, has_gguf_files=False
)
