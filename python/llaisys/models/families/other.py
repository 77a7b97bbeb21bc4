"""Families without relatives here: Phi-3, StarCoder2, StableLM 2, Seed-OSS, Helium, gpt-oss and
MiniMax-M2."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.experts import ExpertFamily
from llaisys.models.families.variant import RopeLayout, Sizes, Variant
from llaisys.models.families.windows import pattern, windows
from llaisys.models.loading.fields import Fields

PHI3 = DecoderFamily(
    name="phi3",
    about="Phi-3 and Phi-4: fused q/k/v and gate/up tensors, LongRoPE, RoPE of part of a head.",
    attention_bias=False,
    windows=windows(),
    has_partial_rotary=True,
    names=TensorNames(has_fused_qkv=True, has_fused_gate_up=True),
    defaults={"rms_norm_eps": 1e-5},
)


def starcoder2_variant(fields: Fields, sizes: Sizes) -> Variant:
    has_bias = fields.boolean("use_bias", True)
    return Variant(norm="layer", norm_bias=True, mlp="gelu", mlp_bias=has_bias)


STARCODER2 = DecoderFamily(
    name="starcoder2",
    about="StarCoder2: layer norms and linear layers with bias, an MLP without a gate.",
    output_bias=True,
    windows=windows(),
    variant=starcoder2_variant,
    names=TensorNames(hf={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
    defaults={"tie_word_embeddings": True, "norm_epsilon": 1e-5, "use_bias": True},
    bias_key="use_bias",
    epsilon_key="norm_epsilon",
    activations=("gelu_pytorch_tanh",),
    gguf_pre_tokenizer="starcoder",
)
STABLELM = DecoderFamily(
    name="stablelm",
    about="StableLM 2: layer norms with bias, RoPE of a quarter of a head.",
    variant=Variant(norm="layer", norm_bias=True),
    has_partial_rotary=True,
    defaults={"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
    unsupported=("use_parallel_residual", "qk_layernorm"),
    bias_key="use_qkv_bias",
    epsilon_key="layer_norm_eps",
    gguf_pre_tokenizer="stablelm2",
)
SEED_OSS = DecoderFamily(
    name="seed_oss",
    about="Seed-OSS: biases on q, k and v, its own default head size.",
    defaults={"head_dim": 128, "attention_bias": True, "rms_norm_eps": 1e-6},
    unsupported=("attention_out_bias",),
    names=TensorNames(gguf={"post_attention_norm": "post_attention_layernorm"}),
    gguf_pre_tokenizer="seed-coder",
)
HELIUM = DecoderFamily(
    name="helium",
    about="Helium: interleaved RoPE, its own default head size.",
    rope_layout=RopeLayout(is_interleaved=True),
    defaults={"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100000.0},
    has_gguf_files=False,
)
GPT_OSS = DecoderFamily(
    name="gpt_oss",
    about="gpt-oss: attention sinks, windows in every second layer, YaRN, a mixture of experts "
    "with biases and a clamped SwiGLU, experts in MXFP4.",
    output_bias=True,
    windows=windows(128, pattern(2)),
    variant=Variant(has_sinks=True),
    experts=ExpertFamily(
        has_bias=True, limit=7.0, alpha=1.702, router="router", is_interleaved=True
    ),
    names=TensorNames(
        hf={"self_attn.post_norm": "post_attention_layernorm"},
        has_sinks=True,
    ),
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "intermediate_size": 2880,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    truncates_yarn=False,
    gguf_architecture="gpt-oss",
)


def minimax_m2_layout(fields: Fields, sizes: Sizes) -> RopeLayout:
    """`rotary_dim` of the published files, else `partial_rotary_factor`."""
    return RopeLayout(rotary_dim=fields.integer("rotary_dim", 0, sizes.head_dim, 0))


MINIMAX_M2 = DecoderFamily(
    name="minimax_m2",
    about="MiniMax-M2: norms of q and k over all heads of a token, RoPE of part of a head, the "
    "experts of Mixtral with sigmoid scores and a bias for the selection.",
    attention_bias=False,
    qk_norm=True,
    variant=Variant(has_row_norms=True),
    rope_layout=minimax_m2_layout,
    has_partial_rotary=True,
    experts=ExpertFamily(
        is_sigmoid=True,
        block="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
        score_bias="e_score_correction_bias",
    ),
    defaults={
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
    },
    gguf_architecture="minimax-m2",
    gguf_pre_tokenizer="minimax-m2",
)
