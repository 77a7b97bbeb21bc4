"""include/llaisys/models/decoder.h"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p

NORM_KINDS = {"rms": 0, "layer": 1}
NORM_POSITIONS = {"before": 0, "after": 1, "both": 2, "residual": 3}
MLP_KINDS = {"swiglu": 0, "geglu": 1, "gelu": 2, "gelu_erf": 3}


class LlaisysDecoderMeta(Structure):
    _fields_ = (
        ("dtype", c_int),
        ("nlayer", c_size_t),
        ("hs", c_size_t),
        ("nh", c_size_t),
        ("nkvh", c_size_t),
        ("dh", c_size_t),
        ("di", c_size_t),
        ("maxseq", c_size_t),
        ("voc", c_size_t),
        ("epsilon", c_float),
        ("theta", c_float),
        ("end_token", c_int64),
        ("sliding_window", c_int64),
        ("layer_windows", c_void_p),
        ("rope_divisors", c_void_p),
        ("rope_attention_factor", c_float),
        ("rope_factor", c_float),
        ("layer_inv_freqs", c_void_p),
        ("attention_scale", c_float),
        ("attention_soft_cap", c_float),
        ("logit_scale", c_float),
        ("logit_soft_cap", c_float),
        ("embedding_scale", c_float),
        ("residual_scale", c_float),
        ("norm_kind", c_int32),
        ("norm_position", c_int32),
        ("mlp_kind", c_int32),
        ("is_parallel", c_int32),
        ("has_row_norms", c_int32),
        ("n_experts", c_size_t),
        ("n_experts_used", c_size_t),
        ("moe_di", c_size_t),
        ("shared_di", c_size_t),
        ("moe_layers", c_void_p),
        ("moe_is_sigmoid", c_int32),
        ("moe_is_renormalised", c_int32),
        ("moe_groups", c_int32),
        ("moe_top_groups", c_int32),
        ("moe_has_score_bias", c_int32),
        ("moe_has_bias", c_int32),
        ("moe_has_shared_gate", c_int32),
        ("moe_scale", c_float),
        ("moe_limit", c_float),
        ("moe_alpha", c_float),
        ("has_sinks", c_int32),
        ("is_bidirectional", c_int32),
        ("has_no_head", c_int32),
        ("has_positions", c_int32),
        ("has_embed_norm", c_int32),
        ("n_token_types", c_size_t),
        ("kv_rank", c_size_t),
        ("q_rank", c_size_t),
        ("rope_dim", c_size_t),
        ("v_dim", c_size_t),
        ("latent_epsilon", c_float),
    )


class LlaisysDecoderWeights(Structure):
    """Tensors, or arrays of tensors by layer."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("in_embed", "out_embed", "out_norm_w", "attn_norm_w"),
            *("attn_q_w", "attn_q_b", "attn_k_w", "attn_k_b", "attn_v_w", "attn_v_b", "attn_o_w"),
            *("mlp_norm_w", "mlp_gate_w", "mlp_up_w", "mlp_down_w"),
            *("attn_o_b", "attn_q_norm_w", "attn_k_norm_w", "attn_post_norm_w", "mlp_post_norm_w"),
            *("attn_norm_b", "mlp_norm_b", "out_norm_b", "mlp_up_b", "mlp_down_b"),
            *("moe_router_w", "moe_router_b", "moe_score_b"),
            *("moe_gate_w", "moe_up_w", "moe_down_w", "moe_gate_b", "moe_up_b", "moe_down_b"),
            *("shared_gate_w", "shared_up_w", "shared_down_w", "shared_scale_w", "attn_sinks_w"),
            *("pos_embed", "type_embed", "embed_norm_w", "embed_norm_b"),
            *("attn_post_norm_b", "mlp_post_norm_b"),
            *("attn_q_a_w", "attn_q_a_norm_w", "attn_kv_a_w", "attn_kv_a_norm_w"),
            *("attn_k_b_w", "attn_v_b_w"),
        )
    )
