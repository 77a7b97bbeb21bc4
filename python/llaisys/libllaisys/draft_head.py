"""include/llaisys/models/draft_head.h"""

from __future__ import annotations

from ctypes import Structure, c_int32, c_size_t, c_void_p

from llaisys.libllaisys.decoder import LlaisysDecoderMeta

DRAFT_HEAD_KINDS = {"eagle": 1, "eagle3": 2, "mtp": 3}


class LlaisysDraftHeadMeta(Structure):
    _fields_ = (
        ("decoder", LlaisysDecoderMeta),
        ("in_voc", c_size_t),
        ("n_features", c_size_t),
        ("kind", c_int32),
        ("reserved", c_int32),
    )


class LlaisysDraftHeadWeights(Structure):
    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("in_embed", "out_embed", "out_norm_w", "token_norm_w", "hidden_norm_w", "feature_w"),
            *("fuse_token_w", "fuse_hidden_w", "fuse_b", "attn_norm_w"),
            *("attn_q_w", "attn_q_b", "attn_k_w", "attn_k_b", "attn_v_w", "attn_v_b"),
            *("attn_q_token_w", "attn_k_token_w", "attn_v_token_w", "attn_o_w"),
            *("mlp_norm_w", "mlp_gate_w", "mlp_up_w", "mlp_down_w"),
        )
    )
