"""A range of rows or columns of a tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """[start, stop) of dimension `dim`, which is 0 or the last; all of the other dimensions."""

    dim: int
    start: int
    stop: int

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this shard of a tensor of `shape`."""
        return (*shape[: self.dim], self.stop - self.start, *shape[self.dim + 1 :])

    def index(self) -> tuple[slice, ...]:
        """Index of a numpy array."""
        return (*([slice(None)] * self.dim), slice(self.start, self.stop))
