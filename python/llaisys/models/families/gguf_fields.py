"""GGUF metadata under the names of config.json, so that a family reads both formats alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llaisys.models.loading.fields import Fields

# Key of config.json -> key of GGUF metadata after the architecture, where they differ.
GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    **dict.fromkeys(("layer_norm_eps", "norm_epsilon"), "attention.layer_norm_epsilon"),
    "rope_theta": "rope.freq_base",
    "rotary_dim": "rope.dimension_count",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_local_base_freq": "rope.freq_base_swa",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), "expert_count"),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), "expert_used_count"),
    "moe_num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), "expert_shared_count"),
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}


class GgufFields(Fields):
    """A name that is not in GGUF_KEYS is a key after the architecture itself."""

    def __init__(self, values: Mapping[str, Any], where: str, arch: str) -> None:
        super().__init__(values, where)
        self.arch = arch

    def key(self, name: str) -> str:
        return f"{self.arch}.{GGUF_KEYS.get(name, name)}"
