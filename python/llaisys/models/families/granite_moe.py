"""Granite MoE: Granite with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.experts import ExpertNames, mixtral_experts
from llaisys.models.families.granite import GRANITE

GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    experts=mixtral_experts,
    expert_names=ExpertNames(
        block="block_sparse_moe",
        router="router.layer",
        gate_up="block_sparse_moe.input_linear.weight",
        all_down="block_sparse_moe.output_linear.weight",
    ),
    gguf_architecture="granitemoe",
)
