"""LoRA adapters by name: the option that lists them, and the plain data that crosses layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from llaisys.common.errors import InvalidInputError
from llaisys.common.option_kinds import Names, json_or_text
from llaisys.common.validation import check_count, check_text, invalid_value

MAX_NAME_CHARS = 256
MAX_MODULES = 1024
NOT_FOUND = "lora_not_found"  # code of errors about unknown adapters
_NAME = re.compile(r"[^\s=\x00-\x1f\x7f]+")


class LoraModule(NamedTuple):
    """A named adapter and its files: a PEFT directory, a GGUF file or a hub id."""

    name: str
    path: str


class LoraLoad(NamedTuple):
    """Fill a device slot with an adapter before a step."""

    slot: int
    lora_id: int


def check_lora_name(name: Any, field: str = "lora_name") -> str:
    text = check_text(field, name)
    check_count(field, len(text), MAX_NAME_CHARS, "characters")
    if not _NAME.fullmatch(text):
        raise invalid_value(field, text, "a name without spaces, '=' and control characters")
    return text


def unknown_lora(name: str) -> InvalidInputError:
    return InvalidInputError(
        f"lora is {name[:MAX_NAME_CHARS]!r}; no LoRA adapter of that name is loaded",
        field="lora",
        code=NOT_FOUND,
        value=name,
        limit="the name of a loaded LoRA adapter",
    )


@dataclass(frozen=True, slots=True)
class LoraModules(Names):
    """Adapters: "name=path", objects with name and path as vLLM's, or a mapping of names to
    paths. The plain form is a tuple of LoraModule."""

    several_words: bool = True

    metavar = "NAME=PATH"

    @staticmethod
    def parse(text: str) -> Any:
        return json_or_text(text) if text.startswith(("[", "{")) else text

    def check(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping) and not {"name", "path"} <= set(value):
            value = [*value.items()]
        elif isinstance(value, (str, Mapping)):
            value = [value]
        if not isinstance(value, (list, tuple)):
            raise invalid_value(name, value, self.limits())
        check_count(name, len(value), MAX_MODULES, "adapters")
        found = tuple(_module(name, item) for item in value)
        names = [module.name for module in found]
        for one in names:
            if names.count(one) > 1:
                raise InvalidInputError(f"{name} has two LoRA adapters named {one!r}", field=name)
        return found

    def limits(self) -> str:
        return "`NAME=PATH`, or objects with `name` and `path`"


def _module(field: str, item: Any) -> LoraModule:
    name: Any
    path: Any
    if isinstance(item, str):
        name, equals, path = item.partition("=")
        if not equals:
            raise invalid_value(field, item, "NAME=PATH")
    elif isinstance(item, Mapping):
        known = {"name", "path", "base_model_name"}  # of vLLM; the base model is known here
        for key in item:
            if key not in known:
                raise invalid_value(f"{field}[].{key}", item[key], "left out: it is unknown")
        name, path = item.get("name"), item.get("path")
    elif isinstance(item, (list, tuple)) and len(item) == 2:
        name, path = item
    else:
        raise invalid_value(field, item, "NAME=PATH or an object with name and path")
    return LoraModule(check_lora_name(name, f"{field}[].name"), check_text(f"{field}[].path", path))


class LoraState(IntEnum):
    READING = 0
    READY = 1  # in host memory
    ON_DISK = 2  # open, not in memory
    FAILED = 3

    @staticmethod
    def of_ranks(states: Sequence[int]) -> LoraState:
        """The state on all ranks together."""
        for state in (LoraState.FAILED, LoraState.READING, LoraState.ON_DISK):
            if state in states:
                return state
        return LoraState.READY
