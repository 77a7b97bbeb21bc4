"""What the loaders ask of a family of models, whatever its forward is. They know no family by name:
whoever opens files gives them the records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.convert import Array
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.gguf_reader import GgufTensor


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What the engine needs to know of any model; a family's own config adds what its forward does.
    Validated once, at load."""

    model_type: str  # the name of its family
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    # 'f32' | 'f16' | 'bf16': what to compute in; 'auto' until the checkpoint has seen the weights,
    # where config.json does not say.
    dtype: str
    generation: dict[str, float | int]  # sampling fields that the model sets


@dataclass(frozen=True, slots=True)
class GgufContents:
    """What a family reads its config from in a GGUF file."""

    metadata: Fields
    tensors: Mapping[str, GgufTensor]  # those that the family has a name for, by that name
    # Reads the tensor rope_freqs.weight, if there is one, provided that it has the given shape.
    read_rope_factors: Callable[[tuple[int, ...]], Array] | None

    def refusal(self, family: str) -> ModelLoadError:
        """What a family without GGUF files says to one."""
        where = self.metadata.where
        return ModelLoadError(f"{where}: {family} models are not read from GGUF files")


class Family(ABC):
    """A record that says how the files of its models are read. Its adapter is in MODEL_REGISTRY
    under the same name."""

    name: str  # model_type of config.json and general.architecture of GGUF files
    gguf_pre_tokenizer: str = "default"  # of GGUF files that do not name one

    @abstractmethod
    def config_from_json(self, fields: Fields, generation: Fields) -> CheckpointConfig:
        """From config.json and generation_config.json; raises ModelLoadError naming the field."""

    @abstractmethod
    def tensors(self, config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor that a model with this config needs, in forward order. The
        config is one that this family made."""

    def config_from_gguf(self, contents: GgufContents) -> CheckpointConfig:
        """From a GGUF file; a family that has no such files refuses them."""
        raise contents.refusal(self.name)

    def name_from_gguf(self, name: str) -> str | None:
        """The Hugging Face name of a tensor of a GGUF file; None for one it does not have."""
        return None

    def permuted_heads(self, name: str, config: Any) -> int | None:
        """Heads of a GGUF tensor whose rows must be put back in order; None: they are."""
        return None


def find_family(families: Mapping[str, Family], model_type: object, where: str) -> Family:
    """Raises `ModelLoadError` naming the file and the families that are known."""
    family = families.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(sorted(families))
        raise ModelLoadError(f"{where}: unknown architecture {model_type!r}; known: {known}")
    return family
