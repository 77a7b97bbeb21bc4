"""Normalisation of the prompt and parameter arguments of `LLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llaisys.common.sampling import SamplingParams
from llaisys.common.validation import invalid_count, invalid_value

Prompt = str | Sequence[int]
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
    """One entry per prompt; a single value applies to all."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, (str, Mapping)) or not isinstance(params, Sequence):
        raise invalid_value("sampling_params", params, "SamplingParams or a list")
    if len(params) != count:
        raise invalid_count("sampling_params", len(params), "entries", f"{count}, one per prompt")
    return list(params)


def as_loras(lora: Lora, count: int) -> list[str | None]:
    """One entry per prompt; a single name applies to all."""
    if lora is None or isinstance(lora, str):
        return [lora] * count
    if isinstance(lora, Mapping) or not isinstance(lora, Sequence):
        raise invalid_value("lora", lora, "the name of an adapter, or a list")
    if len(lora) != count:
        raise invalid_count("lora", len(lora), "entries", f"{count}, one per prompt")
    return list(lora)
