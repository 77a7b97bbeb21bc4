"""A run of rows or of columns of a tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """[start, stop) of dimension `dim`, which is 0 or the last one; all of the others."""

    dim: int
    start: int
    stop: int

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this part of a tensor."""
        return (*shape[: self.dim], self.stop - self.start, *shape[self.dim + 1 :])

    def index(self) -> tuple[slice, ...]:
        """For a numpy array."""
        return (*([slice(None)] * self.dim), slice(self.start, self.stop))
