"""Many short texts in little memory: a vocabulary of 49,152 tokens and as many merges is 10 MB of
Python strings and 1.2 MB of this."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True, slots=True)
class Texts(Sequence[str]):
    """Texts by number, made anew each time they are asked for; messages carry it as it is."""

    data: bytes = b""  # all of them in UTF-8, one after the other
    ends: bytes = b""  # where each ends in `data`: unsigned integers of 4 bytes, in native order

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        data, ends = bytearray(), array("I")
        for text in texts:
            data += text.encode()
            ends.append(len(data))
        return cls(bytes(data), ends.tobytes())

    def __len__(self) -> int:
        return len(self.ends) // 4

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        number = range(len(self))[index]  # raises what a list raises
        if isinstance(number, range):
            return [self[i] for i in number]
        ends = memoryview(self.ends).cast("I")
        return self.data[ends[number - 1] if number else 0 : ends[number]].decode()

    def __iter__(self) -> Iterator[str]:
        first = 0
        for end in memoryview(self.ends).cast("I"):
            yield self.data[first:end].decode()
            first = end
