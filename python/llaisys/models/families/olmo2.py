"""OLMo 2: norms after attention and MLP, norms of q and k over all heads of a token. GGUF files of
OLMo 3 have the same architecture."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.variant import Keys, RopeLayout, Sizes, Variant
from llaisys.models.families.windows import gguf_pattern_windows


def olmo2_variant(keys: Keys, sizes: Sizes) -> Variant:
    return Variant(norm_position="after", has_row_norms=True)


def olmo2_layout(keys: Keys, sizes: Sizes) -> RopeLayout:
    """GGUF files with windows: only the layers without one scale RoPE."""
    if not keys.arch or not keys.fields.has(f"{keys.arch}.attention.sliding_window"):
        return RopeLayout()
    theta = keys.fields.number(f"{keys.arch}.rope.freq_base", 1e-3, 1e12, 10000.0)
    theta = keys.fields.number(f"{keys.arch}.rope.freq_base_swa", 1e-3, 1e12, theta)
    return RopeLayout(window_theta=theta, scales_q_norm=True)


OLMO2 = DecoderFamily(
    name="olmo2",
    output_bias=True,
    qk_norm=True,
    variant=olmo2_variant,
    rope_layout=olmo2_layout,
    gguf_windows=gguf_pattern_windows(4),
    names=TensorNames(
        hf={
            "self_attn.post_norm": "post_attention_layernorm",
            "mlp.post_norm": "post_feedforward_layernorm",
        }
    ),
    defaults={"rms_norm_eps": 1e-5},
)
