"""EXAONE 4: norms after attention and MLP, norms of q and k; with windows in three of four layers,
the others have no RoPE."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.olmo2 import OLMO2
from llaisys.models.families.variant import Keys, RopeLayout, Sizes, Variant
from llaisys.models.families.windows import Windows, gguf_pattern_windows, pattern_windows
from llaisys.models.loading.fields import Fields

_WINDOW, _PATTERN = 4096, 4


def exaone4_windows(fields: Fields, layers: int) -> Windows:
    """`sliding_window` null: full attention in every layer."""
    if "sliding_window" in fields.values and not fields.has("sliding_window"):
        return None, ()
    return pattern_windows(_WINDOW, _PATTERN)(fields, layers)


def exaone4_layout(keys: Keys, sizes: Sizes) -> RopeLayout:
    if keys.arch:
        key = f"{keys.arch}.attention.sliding_window"
        window, chosen = gguf_pattern_windows(_PATTERN)(keys.fields, key, sizes.layers)
    else:
        window, chosen = exaone4_windows(keys.fields, sizes.layers)
    without = () if window is None else (i for i in range(sizes.layers) if i not in chosen)
    return RopeLayout(layers_without=tuple(without))


def exaone4_variant(keys: Keys, sizes: Sizes) -> Variant:
    return Variant(norm_position="after")


EXAONE4 = DecoderFamily(
    name="exaone4",
    attention_bias=False,
    qk_norm=True,
    windows=exaone4_windows,
    gguf_windows=gguf_pattern_windows(_PATTERN),
    variant=exaone4_variant,
    rope_layout=exaone4_layout,
    names=TensorNames(hf=OLMO2.names.hf),
    defaults={"rms_norm_eps": 1e-5},
)
