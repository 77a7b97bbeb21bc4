"""Parts of tensors: a range of rows or columns, and where a tensor is in a checkpoint."""

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


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a tensor of the model is in the checkpoint."""

    name: str
    rows: tuple[int, int] | None = None  # [start, stop) of a fused tensor
    # Row i of a head is row head_order[i] of the file, for every head.
    head_order: tuple[int, ...] | None = None
    add: float = 0.0  # to every element
    scale: float = 1.0  # of every element, after `add`
    # Stacked weights of experts or heads, as one matrix. parts: tensors whose rows are stacked;
    # name is the first of them. planes: the tensor is [planes, rows, columns] or [planes * rows,
    # columns], and `rows` are those of each.
    parts: tuple[str, ...] = ()
    planes: int = 1
    step: int = 1  # of `rows` in planes: gate and up in turn
    is_transposed: bool = False  # planes are [columns, rows]
    columns: tuple[int, int] | None = None  # [start, stop) of the columns of transposed planes
    is_vector: bool = False  # [planes, rows], as one vector: stacked biases
    is_row: bool = False  # a vector [n] or a matrix [1, n], as a matrix
    otherwise: TensorSource | None = None  # if the checkpoint has no tensor `name`

    @property
    def is_changed(self) -> bool:
        """Whether the elements differ from those of the file."""
        return self.add != 0.0 or self.scale != 1.0

    @property
    def is_stacked(self) -> bool:
        return bool(self.parts) or self.planes > 1 or self.is_vector

    @property
    def is_plain(self) -> bool:
        """Whether the rows lie in the file as in the model."""
        return self.step == 1 and not self.is_transposed and not self.is_vector

    @property
    def shard(self) -> Shard | None:
        return None if self.rows is None else Shard(0, *self.rows)
