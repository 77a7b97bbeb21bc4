"""The hyper-parameters of a decoder for the native library."""

import numpy as np

from llaisys.common.errors import ModelLoadError
from llaisys.libllaisys import arrays
from llaisys.libllaisys.handles import dtype_code
from llaisys.libllaisys.types import MLP_KINDS, NORM_KINDS, NORM_POSITIONS, LlaisysDecoderMeta
from llaisys.models.families.experts import Experts
from llaisys.models.families.latent import EPSILON
from llaisys.models.families.model_config import ModelConfig
from llaisys.models.loading.convert import convert

# Fields of Variant with the same name in LlaisysDecoderMeta.
_SAME_NAMES = (
    *("attention_scale", "attention_soft_cap", "logit_scale", "logit_soft_cap", "residual_scale"),
    *("is_parallel", "has_row_norms", "has_sinks"),
)


def decoder_meta(
    config: ModelConfig, dtype: str, max_model_len: int, layers: range
) -> LlaisysDecoderMeta:
    """`max_model_len`: requested context; 0: the model's. The caller rejects more than `maxseq`.
    `layers`: of this rank."""
    length = min(max_model_len or config.max_position_embeddings, config.longest_context)
    meta = LlaisysDecoderMeta(
        dtype=dtype_code(dtype),
        nlayer=len(layers),
        hs=config.hidden_size,
        nh=config.num_heads,
        nkvh=config.num_kv_heads,
        dh=config.head_dim,
        di=config.intermediate_size,
        maxseq=max(length, config.max_position_embeddings),
        voc=config.vocab_size,
        epsilon=config.rms_norm_eps,
        theta=config.rope_theta,
        end_token=config.eos_token_ids[0] if config.eos_token_ids else -1,
    )
    windows = [config.layer_window(layer) or 0 for layer in layers]
    arrays.attach_array(meta, "layer_windows", "i64", windows)
    _set_rope(meta, config, length, layers)
    variant = config.variant
    for name in _SAME_NAMES:
        setattr(meta, name, getattr(variant, name))
    # transformers rounds the multiplier to the dtype of the embeddings.
    scale = np.array([variant.embedding_scale], np.float32)
    meta.embedding_scale = convert(convert(scale, "f32", dtype), dtype, "f32")[0]
    meta.norm_kind = NORM_KINDS[variant.norm]
    meta.norm_position = NORM_POSITIONS[variant.norm_position]
    meta.mlp_kind = MLP_KINDS[variant.mlp]
    if config.experts is not None:
        _set_experts(meta, config.experts, layers)
    if config.encoder is not None:
        meta.is_bidirectional = meta.has_no_head = meta.has_positions = meta.has_embed_norm = 1
        meta.n_token_types = config.encoder.token_types
    if config.latent is not None:
        meta.kv_rank, meta.q_rank = config.latent.rank, config.latent.q_rank
        meta.rope_dim, meta.v_dim = config.latent.rope_dim, config.latent.value_dim
        meta.latent_epsilon = EPSILON
    return meta


def _set_experts(meta: LlaisysDecoderMeta, experts: Experts, layers: range) -> None:
    meta.n_experts, meta.n_experts_used = experts.count, experts.used
    meta.moe_di, meta.shared_di = experts.inner, experts.shared_inner
    arrays.attach_array(meta, "moe_layers", "i64", [int(i in experts.layers) for i in layers])
    meta.moe_is_sigmoid = experts.is_sigmoid
    meta.moe_is_renormalised = experts.is_renormalised
    meta.moe_groups, meta.moe_top_groups = experts.groups, experts.top_groups
    meta.moe_has_score_bias, meta.moe_has_bias = experts.has_score_bias, experts.has_bias
    meta.moe_has_shared_gate = experts.has_shared_gate
    meta.moe_scale, meta.moe_limit, meta.moe_alpha = experts.scale, experts.limit, experts.alpha


def _set_rope(meta: LlaisysDecoderMeta, config: ModelConfig, length: int, layers: range) -> None:
    """`length`: the context that scalings of RoPE depend on."""
    scaling, layout, rotary_dim = config.rope_scaling, config.rope, config.rotary_dim
    divisors = [1.0] * (rotary_dim // 2)
    if scaling is not None:
        divisors = scaling.divisors(config.rope_theta, rotary_dim, length)
    if config.latent is not None:
        if scaling is not None:
            arrays.attach_array(meta, "rope_divisors", "f32", divisors)
            meta.rope_factor = scaling.attention_factor
        return
    is_whole = rotary_dim == config.head_dim and not layout.layers_without
    if is_whole and layout.window_theta is None:
        if scaling is not None:
            arrays.attach_array(meta, "rope_divisors", "f32", divisors)
            meta.rope_attention_factor = scaling.attention_factor
        return
    if scaling is not None:  # the attention factor applies to rotated values only
        meta.rope_factor = 1.0 if layout.scales_q_norm else scaling.attention_factor
        if layout.window_theta is not None and meta.rope_factor != 1.0:
            raise ModelLoadError(
                f"config: a RoPE attention factor of {scaling.attention_factor} in layers without "
                "a window only is not supported"
            )
    rest = [0.0] * ((config.head_dim - rotary_dim) // 2)  # values that are not rotated

    def frequencies(theta: float, divisors: list[float]) -> list[float]:
        own = (theta ** (-2 * i / rotary_dim) / divisor for i, divisor in enumerate(divisors))
        return [*own, *rest]

    plain = frequencies(config.rope_theta, divisors)
    local = plain
    if layout.window_theta is not None:
        local = frequencies(layout.window_theta, [1.0] * len(divisors))
    values: list[float] = []
    for layer in layers:
        of_layer = plain if config.layer_window(layer) is None else local
        values += [0.0] * len(plain) if layer in layout.layers_without else of_layer
    arrays.attach_array(meta, "layer_inv_freqs", "f32", values)
