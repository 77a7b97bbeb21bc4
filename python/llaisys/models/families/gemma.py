"""Gemma 1, 2 and 3 (text) and VaultGemma."""

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.rope import window_theta
from llaisys.models.families.variant import RopeLayout, Sizes, Variant, pattern, scale_of, windows
from llaisys.models.loading.fields import Fields

LOCAL_THETA = 10000.0  # RoPE base of layers with a window in Gemma 3
_LARGE_LAYERS = (46, 62)  # of the 27B models, whose attention scale GGUF files do not have


def gemma_variant(fields: Fields, sizes: Sizes) -> Variant:
    return Variant(mlp="geglu", embedding_scale=sizes.hidden**0.5)


def gemma2_variant(fields: Fields, sizes: Sizes) -> Variant:
    scalar: float = sizes.hidden / sizes.heads
    if not fields.arch:
        scalar = scale_of(fields, "query_pre_attn_scalar", 256.0)
    elif sizes.layers not in _LARGE_LAYERS:
        scalar = sizes.head_dim
    return replace(
        gemma_variant(fields, sizes),
        norm_position="both",
        attention_scale=scalar**-0.5 if scalar else 0.0,
        attention_soft_cap=scale_of(fields, "attn_logit_softcapping"),
        logit_soft_cap=scale_of(fields, "final_logit_softcapping"),
    )


_DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
}
GEMMA = DecoderFamily(
    name="gemma",
    about="Gemma 1, 2 and 3 (text): norm weights stored minus 1, scaled embeddings, GELU. Gemma 2 "
    "adds norms after attention and MLP, soft caps and alternating windows (VaultGemma has no "
    "norms after them); Gemma 3 replaces the caps by norms of q and k and has a RoPE of its own in "
    "layers with a window.",
    variant=gemma_variant,
    defaults=_DEFAULTS,
    activation_keys=("hidden_activation", "hidden_act"),
    activations=("gelu_pytorch_tanh", "gelu"),  # 'gelu' of old files means the approximation
    adds_one_to_norms=True,
)
GEMMA2 = replace(
    GEMMA,
    name="gemma2",
    variant=gemma2_variant,
    windows=windows(4096, pattern(2)),
    activations=("gelu_pytorch_tanh",),
    defaults={**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    names=TensorNames(
        hf={
            "self_attn.post_norm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "mlp.post_norm": "post_feedforward_layernorm",
        }
    ),
)
VAULTGEMMA = replace(
    GEMMA2,
    name="vaultgemma",
    variant=lambda fields, sizes: replace(gemma2_variant(fields, sizes), norm_position="before"),
    names=TensorNames(hf={"post_attention_layernorm": "pre_feedforward_layernorm"}),
    has_gguf_files=False,
)
GEMMA3 = replace(
    GEMMA2,
    name="gemma3_text",
    qk_norm=True,
    windows=windows(4096, pattern(6)),
    rope_layout=lambda fields, _: RopeLayout(window_theta=window_theta(fields, LOCAL_THETA)),
    has_window_rope=True,
    defaults={**_DEFAULTS, "rope_theta": 1e6, "max_position_embeddings": 131072},
    gguf_architecture="gemma3",
)
