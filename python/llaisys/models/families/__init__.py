"""The families of models that can be opened: a record each, found by `model_type`."""

from __future__ import annotations

from llaisys.common.errors import ModelLoadError
from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.family import CheckpointConfig, Family
from llaisys.models.families.llama import LLAMA
from llaisys.models.families.qwen2 import QWEN2
from llaisys.models.families.qwen3 import QWEN3

__all__ = ["FAMILIES", "CheckpointConfig", "DecoderFamily", "Family", "family_of"]

FAMILIES: dict[str, Family] = {family.name: family for family in (QWEN2, LLAMA, QWEN3)}


def family_of(model_type: object, where: str) -> Family:
    """Raises `ModelLoadError` naming the file and the families that are known."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ModelLoadError(f"{where}: unknown architecture {model_type!r}; known: {known}")
    return family
