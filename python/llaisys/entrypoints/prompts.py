"""Prompts and parameters of `LLM`, and what its parts use of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from llaisys.common.sampling import SamplingParams
from llaisys.common.types import RequestOutput
from llaisys.common.validation import invalid_count, invalid_value

Prompt = str | Sequence[int]
Work = tuple[Prompt, SamplingParams | None]
Params = SamplingParams | Sequence[SamplingParams | None] | None
Lora = str | Sequence[str | None] | None


def as_batch(prompts: Prompt | Sequence[Prompt], name: str = "prompts") -> list[Prompt]:
    """A list of prompts from one prompt (a text or token ids) or many. `name`: for errors."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not hasattr(prompts, "__iter__"):
        raise invalid_value(name, prompts, "a string, a list of token ids, or a list of either")
    items = list(prompts)
    if not items:
        raise invalid_count(name, 0, "prompts", "at least 1")
    if all(isinstance(item, str) or hasattr(item, "__iter__") for item in items):
        return items  # type: ignore[return-value]
    return [items]  # type: ignore[list-item]


def as_params(params: Params, count: int) -> list[SamplingParams | None]:
    limit = "SamplingParams or a list"
    return _per_prompt("sampling_params", params, SamplingParams, count, limit)


def as_loras(lora: Lora, count: int) -> list[str | None]:
    return _per_prompt("lora", lora, str, count, "the name of an adapter, or a list")


def _per_prompt(name: str, value: Any, one: type, count: int, limit: str) -> list[Any]:
    """One entry per prompt; a single value applies to all."""
    if value is None or isinstance(value, one):
        return [value] * count
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise invalid_value(name, value, limit)
    if len(value) != count:
        raise invalid_count(name, len(value), "entries", f"{count}, one per prompt")
    return list(value)


class PromptRunner(ABC):
    """What the parts of `LLM` use of it."""

    @property
    @abstractmethod
    def model_info(self) -> Any: ...

    @property
    @abstractmethod
    def tokenizer(self) -> Any: ...

    @abstractmethod
    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    @abstractmethod
    def _run(self, work: list[Work], cache_salt: str | None, use_tqdm: bool) -> list[RequestOutput]:
        """Outputs in the order of `work`."""
