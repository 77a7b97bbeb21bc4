"""`Family`: the loaders' interface to a model family. Loaders receive the registry of families as
an argument."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.convert import Array
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.gguf_reader import GgufTensor
from llaisys.models.loading.shard import TensorSource

GUIDE = "docs/internals/adding_a_model.md"


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Config fields that the engine needs of every model; families extend it. Validated at
    load."""

    model_type: str  # name of the family
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    # Compute dtype: 'f32' | 'f16' | 'bf16'. 'auto' if config.json has none, until the checkpoint
    # has read the headers of the weights.
    dtype: str
    generation: dict[str, float | int]  # sampling defaults of the model


@dataclass(frozen=True, slots=True)
class GgufContents:
    """Contents of a GGUF file from which a family builds its config."""

    metadata: Fields
    tensors: Mapping[str, GgufTensor]  # known tensors, by Hugging Face name
    # Reads a small tensor by its name in the file; it must have the given shape. None: no such
    # tensor.
    read_vector: Callable[[str, tuple[int, ...]], Array | None]

    def unsupported(self, family: str) -> ModelLoadError:
        """The error of a family without GGUF support."""
        where = self.metadata.where
        return ModelLoadError(f"{where}: {family} models are not supported in GGUF files")


class Family(ABC):
    """How the files of a group of architectures are read. MODEL_REGISTRY has the adapter under the
    same name."""

    name: str  # model_type of config.json and general.architecture of GGUF files
    about: str = ""  # for the reference page
    gguf_pre_tokenizer: str = "default"  # for GGUF files without tokenizer.ggml.pre

    @abstractmethod
    def config_from_json(self, fields: Fields, generation: Fields) -> CheckpointConfig:
        """From config.json and generation_config.json; raises ModelLoadError naming the field."""

    @abstractmethod
    def tensors(self, config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor that a model with this config needs, in forward order.
        `config`: created by this family."""

    def config_from_gguf(self, contents: GgufContents) -> CheckpointConfig:
        """From a GGUF file; ModelLoadError for a family without GGUF support."""
        raise contents.unsupported(self.name)

    def architecture(self) -> str:
        """general.architecture of GGUF files."""
        return self.name

    def source(self, name: str, config: Any, is_gguf: bool) -> TensorSource:
        """Where the tensor `name` of `tensors` is in the files."""
        return TensorSource(name)

    def name_from_gguf(self, name: str) -> str | None:
        """The Hugging Face name of a GGUF tensor; None for an unknown tensor."""
        return None

    def permuted_heads(self, name: str, config: Any) -> int | None:
        """Number of heads of a GGUF tensor with permuted rows; None: not permuted."""
        return None


class UnknownFamilyError(ModelLoadError):
    """A model of a family that is not registered."""


def find_family(families: Mapping[str, Family], model_type: object, where: str) -> Family:
    """The family of a model_type. The ModelLoadError names the known ones, the nearest of them
    and the guide."""
    family = families.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(sorted(families))
        near = get_close_matches(str(model_type).lower(), families, n=1, cutoff=0.6)
        nearest = f"; nearest: {near[0]}" if near else ""
        raise UnknownFamilyError(
            f"{where}: unknown architecture {str(model_type)[:80]!r}; known: {known}{nearest}; to "
            f"add one: {GUIDE}"
        )
    return family
