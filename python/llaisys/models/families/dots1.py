"""dots.llm1: norms of q and k, sigmoid scores with a bias for the selection, shared experts, dense
layers first."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.experts import ExpertNames
from llaisys.models.families.glm4_moe import glm4_experts
from llaisys.models.families.windows import Windows, window_layers, with_layers
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.limits import MAX_POSITIONS


def dots1_windows(fields: Fields, layers: int) -> Windows:
    """Layers from max_window_layers on, or those of layer_types."""
    window = fields.integer("sliding_window", 1, MAX_POSITIONS, None)
    chosen = window_layers(fields, layers)
    if chosen is None:
        first = fields.integer("max_window_layers", 0, MAX_POSITIONS, 62)
        chosen = tuple(range(min(first, layers), layers))
    return with_layers(window, chosen)


DOTS1 = DecoderFamily(
    name="dots1",
    output_bias=True,
    qk_norm=True,
    windows=dots1_windows,
    experts=glm4_experts,
    expert_names=ExpertNames(shared="shared_experts"),
    defaults={"first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": 0},
    gguf_pre_tokenizer="qwen2",
)
