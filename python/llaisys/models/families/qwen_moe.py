"""Qwen3-MoE (Qwen3-30B-A3B and others) and Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B)."""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.experts import MAX_EXPERTS, Experts
from llaisys.models.families.qwen2 import QWEN2
from llaisys.models.families.qwen3 import QWEN3
from llaisys.models.families.variant import Keys, Sizes
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.limits import MAX_INTERMEDIATE, MAX_LAYERS


def sparse_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Every decoder_sparse_step-th layer, without those of mlp_only_layers."""
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise fields.fail("mlp_only_layers", "must be a list of layer numbers")
    return tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in dense)


def _count(keys: Keys, default: int) -> int:
    """`num_experts`, which newer versions of transformers write as `num_local_experts`."""
    count = keys.integer("num_local_experts", "expert_count", MAX_EXPERTS, 0)
    return count or keys.integer("num_experts", "", MAX_EXPERTS, default)


def qwen3_experts(keys: Keys, sizes: Sizes) -> Experts | None:
    is_gguf = bool(keys.arch)
    all_layers = tuple(range(sizes.layers))
    return Experts(
        count=_count(keys, 128),
        used=keys.integer("num_experts_per_tok", "expert_used_count", MAX_EXPERTS, 8),
        inner=keys.integer(
            "moe_intermediate_size", "expert_feed_forward_length", MAX_INTERMEDIATE, 768
        ),
        layers=all_layers if is_gguf else sparse_layers(keys.fields, sizes.layers),
        is_renormalised=is_gguf or keys.boolean("norm_topk_prob", "", False),
    )


def qwen2_experts(keys: Keys, sizes: Sizes) -> Experts | None:
    experts = qwen3_experts(keys, sizes)
    if experts is None:
        return None
    json = keys.fields
    return replace(
        experts,
        count=_count(keys, 60),
        used=keys.integer("num_experts_per_tok", "expert_used_count", MAX_EXPERTS, 4),
        inner=keys.integer(
            "moe_intermediate_size", "expert_feed_forward_length", MAX_INTERMEDIATE, 1408
        ),
        shared_inner=keys.integer(
            *("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
            *(MAX_INTERMEDIATE, 5632),
        ),
        is_renormalised=not keys.arch and json.boolean("norm_topk_prob", False),
        has_shared_gate=True,
    )


QWEN3_MOE = replace(QWEN3, name="qwen3_moe", experts=qwen3_experts, gguf_architecture="qwen3moe")
QWEN2_MOE = replace(QWEN2, name="qwen2_moe", experts=qwen2_experts, gguf_architecture="qwen2moe")
