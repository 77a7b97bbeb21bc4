"""Mixtral: Mistral with a mixture of experts in every layer. Its GGUF files have the architecture
"llama"."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.experts import ExpertNames, mixtral_experts
from llaisys.models.families.windows import Windows
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.limits import MAX_POSITIONS


def mixtral_windows(fields: Fields, layers: int) -> Windows:
    """`sliding_window` applies to every layer; missing or null: no window."""
    window = fields.integer("sliding_window", 1, MAX_POSITIONS, None)
    return (None, ()) if window is None else (window, tuple(range(layers)))


MIXTRAL = DecoderFamily(
    name="mixtral",
    attention_bias=False,
    windows=mixtral_windows,
    experts=mixtral_experts,
    expert_names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    has_gguf_files=False,
)
