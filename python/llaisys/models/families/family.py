"""What the loaders ask of a family of models, whatever its forward is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llaisys.models.loading.fields import Fields


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What the engine needs to know of any model; a family's own config adds what its forward does.
    Validated once, at load."""

    model_type: str  # a key of FAMILIES
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    # 'f32' | 'f16' | 'bf16': what to compute in; 'auto' until the checkpoint has seen the weights,
    # where config.json does not say.
    dtype: str
    generation: dict[str, float | int]  # sampling fields that the model sets


class Family(ABC):
    """A record in FAMILIES. Its adapter is in MODEL_REGISTRY under the same name."""

    name: str  # model_type of config.json

    @abstractmethod
    def config_from_json(self, fields: Fields, generation: Fields) -> CheckpointConfig:
        """From config.json and generation_config.json; raises ModelLoadError naming the field."""

    @abstractmethod
    def tensors(self, config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor that a model with this config needs, in forward order."""
