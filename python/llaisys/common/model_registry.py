"""Adapters by model type. Adapters are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from llaisys.common.validation import invalid_value

if TYPE_CHECKING:
    from llaisys.models.base import ModelAdapter

# model_type -> "module:class". Add a line per model (docs/internals/adding_a_model.md).
MODEL_REGISTRY: dict[str, str] = {
    "qwen2": "llaisys.models.decoder:DecoderAdapter",
    "llama": "llaisys.models.decoder:DecoderAdapter",
    "qwen3": "llaisys.models.decoder:DecoderAdapter",
    "mistral": "llaisys.models.decoder:DecoderAdapter",
    "mimo": "llaisys.models.decoder:DecoderAdapter",
    "phi3": "llaisys.models.decoder:DecoderAdapter",
    "smollm3": "llaisys.models.decoder:DecoderAdapter",
    "granite": "llaisys.models.decoder:DecoderAdapter",
    "olmo2": "llaisys.models.decoder:DecoderAdapter",
    "glm": "llaisys.models.decoder:DecoderAdapter",
    "glm4": "llaisys.models.decoder:DecoderAdapter",
    "gemma": "llaisys.models.decoder:DecoderAdapter",
    "gemma2": "llaisys.models.decoder:DecoderAdapter",
    "gemma3_text": "llaisys.models.decoder:DecoderAdapter",
    "cohere": "llaisys.models.decoder:DecoderAdapter",
    "cohere2": "llaisys.models.decoder:DecoderAdapter",
    "starcoder2": "llaisys.models.decoder:DecoderAdapter",
    "stablelm": "llaisys.models.decoder:DecoderAdapter",
    "qwen3_moe": "llaisys.models.decoder:DecoderAdapter",
    "qwen2_moe": "llaisys.models.decoder:DecoderAdapter",
    "mixtral": "llaisys.models.decoder:DecoderAdapter",
    "olmoe": "llaisys.models.decoder:DecoderAdapter",
    "granitemoe": "llaisys.models.decoder:DecoderAdapter",
    "exaone4": "llaisys.models.decoder:DecoderAdapter",
    "ernie4_5": "llaisys.models.decoder:DecoderAdapter",
    "seed_oss": "llaisys.models.decoder:DecoderAdapter",
    "helium": "llaisys.models.decoder:DecoderAdapter",
    "olmo3": "llaisys.models.decoder:DecoderAdapter",
    "ministral": "llaisys.models.decoder:DecoderAdapter",
    "vaultgemma": "llaisys.models.decoder:DecoderAdapter",
    "cwm": "llaisys.models.decoder:DecoderAdapter",
    "dots1": "llaisys.models.decoder:DecoderAdapter",
    "solar_open": "llaisys.models.decoder:DecoderAdapter",
    "minimax_m2": "llaisys.models.decoder:DecoderAdapter",
    "exaone_moe": "llaisys.models.decoder:DecoderAdapter",
    "ernie4_5_moe": "llaisys.models.decoder:DecoderAdapter",
    "gpt_oss": "llaisys.models.decoder:DecoderAdapter",
    "glm4_moe": "llaisys.models.decoder:DecoderAdapter",
    "bert": "llaisys.models.decoder:DecoderAdapter",
    "roberta": "llaisys.models.decoder:DecoderAdapter",
    "xlm-roberta": "llaisys.models.decoder:DecoderAdapter",
    "deepseek_v2": "llaisys.models.decoder:DecoderAdapter",
    "deepseek_v3": "llaisys.models.decoder:DecoderAdapter",
    "kimi_k2": "llaisys.models.decoder:DecoderAdapter",
    "glm4_moe_lite": "llaisys.models.decoder:DecoderAdapter",
    "mock": "llaisys.models.mock:MockAdapter",
}


def register_model(model_type: str, location: str) -> None:
    """Public, for models outside this package: register an adapter as "module:class". The type must
    be new."""
    if model_type in MODEL_REGISTRY:
        raise invalid_value("model_type", model_type, "one that is not registered yet")
    if location.count(":") != 1:
        raise invalid_value("location", location, "'module:class'")
    MODEL_REGISTRY[model_type] = location


def get_adapter_class(model_type: str) -> type[ModelAdapter]:
    """Return the adapter class of a model type; InvalidInputError lists the known types."""
    location = MODEL_REGISTRY.get(model_type)
    if location is None:
        known = ", ".join(sorted(MODEL_REGISTRY))
        raise invalid_value("model_type", model_type, f"one of {known}")
    module, name = location.split(":")
    adapter: type[ModelAdapter] = getattr(import_module(module), name)
    return adapter
