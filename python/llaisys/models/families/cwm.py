"""Code World Model: Llama with windows in three of four layers."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.windows import Windows, window_layers, with_layers
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.limits import MAX_POSITIONS

_WINDOW, _PATTERN = 8192, 4


def cwm_windows(fields: Fields, layers: int) -> Windows:
    """Every fourth layer from the first has full attention, unless `layer_types` names others."""
    window = fields.integer("sliding_window", 0, MAX_POSITIONS, _WINDOW)
    chosen = window_layers(fields, layers)
    if chosen is None:
        chosen = tuple(i for i in range(layers) if i % _PATTERN)
    return with_layers(window or None, chosen)


CWM = DecoderFamily(
    name="cwm",
    attention_bias=False,
    windows=cwm_windows,
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    has_gguf_files=False,
)
