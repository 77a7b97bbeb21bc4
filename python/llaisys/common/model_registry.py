"""Adapters by model type. Adapters are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from llaisys.common.validation import invalid_value

if TYPE_CHECKING:
    from llaisys.models.base import ModelAdapter

# The decoder's model types. Add a name per model (docs/internals/adding_a_model.md).
DECODERS = """
    qwen2 llama qwen3 mistral mimo phi3 smollm3 granite olmo2 glm glm4 gemma gemma2 gemma3_text
    cohere cohere2 starcoder2 stablelm qwen3_moe qwen2_moe mixtral olmoe granitemoe exaone4
    ernie4_5 seed_oss helium olmo3 ministral vaultgemma cwm dots1 solar_open minimax_m2
    exaone_moe ernie4_5_moe gpt_oss glm4_moe bert roberta xlm-roberta deepseek_v2 deepseek_v3
    kimi_k2 glm4_moe_lite
""".split()

# model_type -> "module:class"
MODEL_REGISTRY: dict[str, str] = {
    **dict.fromkeys(DECODERS, "llaisys.models.decoder:DecoderAdapter"),
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
    return getattr(import_module(module), name)
