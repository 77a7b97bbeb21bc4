"""Qwen2, Qwen3, their mixtures of experts, and MiMo."""

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.experts import ExpertFamily
from llaisys.models.families.variant import Windows, late_layers, windows
from llaisys.models.loading.fields import Fields

_MOE = "Qwen3-MoE (Qwen3-30B-A3B and others) and Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B)."


def qwen_windows(fields: Fields, layers: int) -> Windows:
    """With `use_sliding_window`: layers from max_window_layers on, or those of layer_types."""
    if not fields.arch and not fields.boolean("use_sliding_window", False):
        return None, ()
    return windows(None, late_layers(28))(fields, layers)


QWEN2 = DecoderFamily(
    name="qwen2",
    about="Qwen2 and Qwen2.5: biases on q, k and v; sliding windows on some or all layers.",
    attention_bias=True,
    windows=qwen_windows,
    gguf_pre_tokenizer="qwen2",
)
MIMO = replace(
    QWEN2,
    name="mimo",
    about="MiMo: Qwen2 with multi-token prediction layers (`mtp_layers`) for speculative decoding.",
    has_gguf_files=False,
)
QWEN3 = DecoderFamily(
    name="qwen3",
    about="Qwen3: RMS norm per head of q and k, its own default head size, biases only if "
    "configured.",
    output_bias=True,
    qk_norm=True,
    windows=qwen_windows,
    defaults={"head_dim": 128},
    gguf_pre_tokenizer="qwen2",
)
QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    about=_MOE,
    experts=ExpertFamily(inner=768),
    defaults={
        **QWEN3.defaults,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    gguf_architecture="qwen3moe",
)
QWEN2_MOE = replace(
    QWEN2,
    name="qwen2_moe",
    about=_MOE,
    experts=ExpertFamily(
        inner=1408, shared_inner=5632, is_renormalised=False, has_shared_gate=True
    ),
    defaults={"num_experts": 60, "num_experts_per_tok": 4},
    gguf_architecture="qwen2moe",
)
