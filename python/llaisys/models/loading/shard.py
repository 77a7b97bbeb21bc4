"""A range of rows or columns of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Shard:
    """[start, stop) of dimension `dim`, which is 0 or the last; all of the other dimensions."""

    dim: int
    start: int
    stop: int
    parts: int = 1  # dimension 0: the range is one of each of so many equal ranges of rows

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this shard of a tensor of `shape`."""
        size = self.parts * (self.stop - self.start)
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def cut(self, values: NDArray[Any]) -> NDArray[Any]:
        """The shard of an array."""
        if self.parts == 1:
            return values[self.index()]
        ranges = values.reshape(self.parts, -1, *values.shape[1:])
        return ranges[:, self.start : self.stop].reshape(self.shape_in(values.shape))

    def index(self) -> tuple[slice, ...]:
        """Index of a numpy array."""
        return (*([slice(None)] * self.dim), slice(self.start, self.stop))
