"""include/llaisys/models/decoder.h"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p

NORM_KINDS = {"rms": 0, "layer": 1}
NORM_POSITIONS = {"before": 0, "after": 1, "both": 2}
MLP_KINDS = {"swiglu": 0, "geglu": 1, "gelu": 2}


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
    )


class LlaisysDecoderWeights(Structure):
    _fields_ = (
        ("in_embed", c_void_p),
        ("out_embed", c_void_p),
        ("out_norm_w", c_void_p),
        ("attn_norm_w", c_void_p),
        ("attn_q_w", c_void_p),
        ("attn_q_b", c_void_p),
        ("attn_k_w", c_void_p),
        ("attn_k_b", c_void_p),
        ("attn_v_w", c_void_p),
        ("attn_v_b", c_void_p),
        ("attn_o_w", c_void_p),
        ("mlp_norm_w", c_void_p),
        ("mlp_gate_w", c_void_p),
        ("mlp_up_w", c_void_p),
        ("mlp_down_w", c_void_p),
        ("attn_o_b", c_void_p),
        ("attn_q_norm_w", c_void_p),
        ("attn_k_norm_w", c_void_p),
        ("attn_post_norm_w", c_void_p),
        ("mlp_post_norm_w", c_void_p),
        ("attn_norm_b", c_void_p),
        ("mlp_norm_b", c_void_p),
        ("out_norm_b", c_void_p),
        ("mlp_up_b", c_void_p),
        ("mlp_down_b", c_void_p),
    )
