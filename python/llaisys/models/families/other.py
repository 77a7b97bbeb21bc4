"""Phi-3, StarCoder2, StableLM 2, Seed-OSS, Helium, gpt-oss, MiniMax-M2, Command R, Granite, EXAONE
and ERNIE."""

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.experts import ExpertFamily
from llaisys.models.families.olmo import OLMO2
from llaisys.models.families.variant import RopeLayout, Sizes, Variant, pattern, scale_of, windows
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


def cohere_variant(fields: Fields, sizes: Sizes) -> Variant:
    scale = scale_of(fields, "logit_scale", 0.0625)
    return Variant(norm="layer", is_parallel=True, logit_scale=scale)


COHERE = DecoderFamily(
    name="cohere",
    about="Command R (`cohere`) and Command R7B / Command A (`cohere2`): attention and MLP in "
    "parallel, a layer norm without bias, interleaved RoPE, scaled logits. Cohere 2 has windows in "
    "three of four layers and no RoPE in the others.",
    output_bias=True,
    variant=cohere_variant,
    rope_layout=RopeLayout(is_interleaved=True),
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "rope_theta": 500000.0},
    unsupported=("use_qk_norm",),
    epsilon_key="layer_norm_eps",
    gguf_architecture="command-r",
    gguf_pre_tokenizer="command-r",
)
COHERE2 = replace(
    COHERE,
    name="cohere2",
    windows=windows(4096, pattern(4)),
    has_rope_in_windows_only=True,
    defaults={**COHERE.defaults, "rope_theta": 10000.0},
    gguf_architecture="cohere2",
)


def granite_variant(fields: Fields, sizes: Sizes) -> Variant:
    divisor = scale_of(fields, "logits_scaling", 1.0)
    return Variant(
        embedding_scale=scale_of(fields, "embedding_multiplier", 1.0),
        residual_scale=scale_of(fields, "residual_multiplier", 1.0),
        attention_scale=scale_of(fields, "attention_multiplier", 1.0),
        logit_scale=1 / divisor if divisor else 1.0,
    )


GRANITE = DecoderFamily(
    name="granite",
    about="Granite: multipliers of embeddings, attention scores, residual stream and logits.",
    output_bias=True,
    variant=granite_variant,
    defaults={"rms_norm_eps": 1e-6},
    is_permuted_in_gguf=True,
)
GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    about="Granite MoE: Granite with a mixture of experts in every layer.",
    experts=ExpertFamily(
        block="block_sparse_moe",
        router="router.layer",
        gate_up="block_sparse_moe.input_linear.weight",
        all_down="block_sparse_moe.output_linear.weight",
    ),
    defaults={**GRANITE.defaults, "num_experts_per_tok": 2},
)


EXAONE4 = DecoderFamily(
    name="exaone4",
    about="EXAONE 4: norms after attention and MLP, norms of q and k; with windows in three of "
    "four layers, the others have no RoPE.",
    attention_bias=False,
    qk_norm=True,
    windows=windows(4096, pattern(4)),
    variant=Variant(norm_position="after"),
    has_rope_in_windows_only=True,
    names=OLMO2.names,
    defaults={"rms_norm_eps": 1e-5},
)
EXAONE_MOE = replace(
    EXAONE4,
    name="exaone_moe",
    about="K-EXAONE: the attention of EXAONE 4, norms before attention and MLP, sigmoid scores "
    "with a bias for the selection, shared experts, dense layers first.",
    variant=Variant(),
    names=TensorNames(),
    experts=ExpertFamily(
        is_sigmoid=True, shared="shared_experts", score_bias="e_score_correction_bias"
    ),
    defaults={
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    },
    gguf_architecture="exaone-moe",
    gguf_pre_tokenizer="exaone-moe",
)


_DEFAULTS = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}

ERNIE4_5 = DecoderFamily(
    name="ernie4_5",
    about="ERNIE 4.5 (dense): interleaved RoPE.",
    attention_bias=False,
    rope_layout=RopeLayout(is_interleaved=True),
    defaults={**_DEFAULTS, "head_dim": 128},
    unsupported=("use_bias",),
)
ERNIE4_5_MOE = replace(
    ERNIE4_5,
    name="ernie4_5_moe",
    about="ERNIE 4.5 with experts: softmax scores with a bias for the selection, shared experts, "
    "dense layers first.",
    experts=ExpertFamily(
        inner=1536,
        has_score_bias=True,
        shared="shared_experts",
        score_bias="moe_statics.e_score_correction_bias",
        is_score_bias_row=True,
    ),
    defaults={
        **_DEFAULTS,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    gguf_architecture="ernie4_5-moe",
)
