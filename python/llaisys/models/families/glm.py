"""GLM-4 and GLM-4.5, and the families with the experts of GLM-4.5: dots.llm1 and Solar Open."""

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.experts import ExpertFamily
from llaisys.models.families.variant import RopeLayout, Variant, late_layers, windows

GLM = DecoderFamily(
    name="glm",
    about="GLM-4: interleaved RoPE of half of a head, fused gate and up; GLM-4-0414 (`glm4`) also "
    "has norms after attention and MLP.",
    rope_layout=RopeLayout(is_interleaved=True),
    has_partial_rotary=True,
    names=TensorNames(has_fused_gate_up=True),
    # The config class of transformers has other defaults than most.
    defaults={
        "partial_rotary_factor": 0.5,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "rms_norm_eps": 0.00000015625,
        "max_position_embeddings": 131072,
    },
    gguf_architecture="chatglm",
    gguf_pre_tokenizer="chatglm-bpe",
)
GLM4 = replace(
    GLM,
    name="glm4",
    variant=Variant(norm_position="both"),
    names=TensorNames(
        hf={
            "self_attn.post_norm": "post_self_attn_layernorm",
            "mlp.post_norm": "post_mlp_layernorm",
        },
        has_fused_gate_up=True,
    ),
    gguf_architecture="glm4",
    gguf_pre_tokenizer="glm4",
)
_EXPERTS = ExpertFamily(is_sigmoid=True, shared="shared_experts")
_EXPERT_DEFAULTS = {
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
GLM4_MOE = DecoderFamily(
    name="glm4_moe",
    about="GLM-4.5 and GLM-4.5-Air: sigmoid scores with a bias for the selection, groups of "
    "experts, shared experts, dense layers first, RoPE of part of a head. GGUF files of Solar Open "
    "have the same architecture.",
    qk_norm_key="use_qk_norm",
    has_partial_rotary=True,
    experts=_EXPERTS,
    defaults={**_EXPERT_DEFAULTS, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
    names=TensorNames(gguf={"post_attention_norm": "post_attention_layernorm"}),
    gguf_architecture="glm4moe",
    gguf_pre_tokenizer="glm4",
)
SOLAR_OPEN = DecoderFamily(
    name="solar_open",
    about="Solar Open: the experts of GLM-4.5 in every layer, the attention of Llama.",
    experts=_EXPERTS,
    defaults={
        **_EXPERT_DEFAULTS,
        "first_k_dense_replace": 0,
        "intermediate_size": 1,  # no layer has a dense MLP
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    has_gguf_files=False,  # they have the architecture of GLM-4.5
)
DOTS1 = DecoderFamily(
    name="dots1",
    about="dots.llm1: norms of q and k, sigmoid scores with a bias for the selection, shared "
    "experts, dense layers first.",
    output_bias=True,
    qk_norm=True,
    windows=windows(None, late_layers(62)),
    experts=_EXPERTS,
    defaults={
        **_EXPERT_DEFAULTS,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "n_shared_experts": 0,
    },
    gguf_pre_tokenizer="qwen2",
)
