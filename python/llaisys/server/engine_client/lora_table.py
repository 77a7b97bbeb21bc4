"""The LoRA adapters of a model as the API shows them. The engine has the weights."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.lora import MAX_MODULES, LoraModule, unknown_lora
from llaisys.common.validation import check_count, invalid_value


@dataclass(frozen=True, slots=True)
class LoraEntry:
    """A loaded adapter."""

    name: str
    path: str
    created: int  # Unix time


class LoraTable:
    """Adapters by name, in the order of loading; llama.cpp's ids are indices of this order."""

    def __init__(self, modules: Sequence[LoraModule]) -> None:
        now = int(time.time())
        self._initial = {module.name: module.path for module in modules}
        self._entries = {m.name: LoraEntry(m.name, m.path, now) for m in modules}
        self._loading: set[str] = set()
        self.default: str | None = None  # of llama.cpp's routes, for requests without `lora`

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LoraEntry]:
        return iter(tuple(self._entries.values()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def find(self, name: str) -> LoraEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise unknown_lora(name)
        return entry

    def select(self, wanted: Any) -> str | None:
        """The adapter of a request's `lora` field: a name, or llama.cpp's list of (id, scale)."""
        if isinstance(wanted, str):
            return self.find(wanted).name
        names, chosen = self.names, []
        for number, scale in wanted:
            if number >= len(names):
                limit = f"below {len(names)}, the number of adapters"
                raise invalid_value("lora[].id", number, limit)
            if scale not in (0, 1):
                raise invalid_value("lora[].scale", scale, "0 or 1")
            if scale:
                chosen.append(names[number])
        if len(chosen) > 1:
            raise invalid_value("lora", len(chosen), "one adapter with scale 1 at most")
        return chosen[0] if chosen else None

    def begin_load(self, name: str, in_place: bool) -> None:
        """Reserve a name; `end_load` must follow. InvalidInputError: it is taken, or there are too
        many."""
        if name in self._loading or (name in self._entries and not in_place):
            raise InvalidInputError(
                f"lora_name is {name!r}; a LoRA adapter of that name is already loaded",
                field="lora_name",
                code="lora_already_loaded",
            )
        count = len(self._entries.keys() | self._loading | {name})
        check_count("lora_name", count, MAX_MODULES, "LoRA adapters")
        self._loading.add(name)

    def end_load(self, name: str, path: str | None) -> None:
        """`path`: of the loaded adapter; None: the load failed."""
        self._loading.discard(name)
        if path is not None:
            self._entries[name] = LoraEntry(name, path, int(time.time()))

    def remove(self, name: str) -> LoraEntry:
        entry = self.find(name)
        del self._entries[name]
        if self.default == name:
            self.default = None
        return entry

    def changes(self) -> tuple[list[str], list[LoraEntry]]:
        """What an engine started from the configuration must change: (names to unload, adapters to
        load)."""
        gone = [name for name in self._initial if name not in self._entries]
        new = [e for e in self._entries.values() if self._initial.get(e.name) != e.path]
        return gone, new
