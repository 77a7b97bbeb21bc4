"""include/llaisys/models/decoder.h"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_int64, c_size_t, c_void_p


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
    )
