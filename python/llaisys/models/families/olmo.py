"""OLMo 2, OLMo 3 and OLMoE: norms of q and k over all heads of a token."""

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.experts import ExpertFamily
from llaisys.models.families.rope import rope_section, window_theta
from llaisys.models.families.variant import (
    RopeLayout,
    Sizes,
    Variant,
    Windows,
    no_windows,
    pattern,
    windows,
)
from llaisys.models.loading.fields import Fields

olmo3_windows = windows(4096, pattern(4))


def olmo3_layout(fields: Fields, sizes: Sizes) -> RopeLayout:
    """Scaling of RoPE applies to layers without a window only."""
    section = rope_section(fields)
    holder = section if section.has("rope_theta") else fields
    theta = holder.number("rope_theta", 1e-3, 1e12, 10000.0)
    return RopeLayout(window_theta=window_theta(fields, theta), scales_q_norm=True)


def olmo2_windows(fields: Fields, layers: int) -> Windows:
    """GGUF files of OLMo 3 have the architecture of OLMo 2, and windows."""
    return (olmo3_windows if fields.arch else no_windows)(fields, layers)


def olmo2_layout(fields: Fields, sizes: Sizes) -> RopeLayout:
    has_windows = fields.arch and fields.has("sliding_window")
    return olmo3_layout(fields, sizes) if has_windows else RopeLayout()


OLMO2 = DecoderFamily(
    name="olmo2",
    about="OLMo 2: norms after attention and MLP, norms of q and k over all heads of a token. GGUF "
    "files of OLMo 3 have the same architecture.",
    output_bias=True,
    qk_norm=True,
    windows=olmo2_windows,
    variant=Variant(norm_position="after", has_row_norms=True),
    rope_layout=olmo2_layout,
    names=TensorNames(
        hf={
            "self_attn.post_norm": "post_attention_layernorm",
            "mlp.post_norm": "post_feedforward_layernorm",
        }
    ),
    defaults={"rms_norm_eps": 1e-5},
)
OLMO3 = replace(
    OLMO2,
    name="olmo3",
    about="OLMo 3: OLMo 2 with windows in three of four layers; the others may scale RoPE.",
    windows=olmo3_windows,
    rope_layout=olmo3_layout,
    has_window_rope=True,
    defaults={**OLMO2.defaults, "rope_theta": 500000.0},
    has_gguf_files=False,  # they have the architecture of OLMo 2
)
OLMOE = DecoderFamily(
    name="olmoe",
    about="OLMoE: norms of q and k over all heads of a token, experts in every layer.",
    output_bias=True,
    qk_norm=True,
    variant=Variant(has_row_norms=True),
    experts=ExpertFamily(is_renormalised=False),
    defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    unsupported=("clip_qkv",),
    gguf_pre_tokenizer="olmo",
)
