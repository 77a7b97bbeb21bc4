"""What an adapter sees of a model on disk, whatever its file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llaisys.common.closing import Closing
from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.convert import Array, convert, storage_dtype
from llaisys.models.loading.family import CheckpointConfig, Family
from llaisys.models.loading.file_range import FileIdentity, read_range, read_rows
from llaisys.models.loading.shard import Shard
from llaisys.tokenization.source import TokenizerSource


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Row-major little-endian elements at [offset, offset + nbytes) of the file at `path`.

    The range was inside the file when the header was read; reading checks again.
    """

    name: str  # Hugging Face tensor name
    dtype: str  # 'f32' | 'f16' | 'bf16'
    shape: tuple[int, ...]
    path: Path
    offset: int  # from the start of the file; any alignment
    nbytes: int  # product(shape) * element size
    file: FileIdentity  # the file whose header was read

    def read_into(self, target: memoryview) -> None:
        """Fill `nbytes` bytes; `ModelLoadError` when the file is no longer what it was."""
        read_range(self.path, self.offset, target, self.file)

    def rows(self, part: Shard) -> TensorRecord:
        """The record of a run of rows (dimension 0)."""
        size = self.nbytes // self.shape[0] if self.shape[0] else 0  # of a row
        return replace(
            self,
            shape=part.shape_in(self.shape),
            offset=self.offset + part.start * size,
            nbytes=(part.stop - part.start) * size,
        )

    def read_shard(self, part: Shard) -> Array:
        """The elements of a part, and no others, read from the file."""
        shape, kind = part.shape_in(self.shape), storage_dtype(self.dtype)
        values = np.empty(shape, kind)
        target = values.reshape(-1).view(np.uint8).data
        if part.dim == 0:
            self.rows(part).read_into(target)
        else:
            width, stride = shape[-1] * kind.itemsize, self.shape[-1] * kind.itemsize
            begin = self.offset + part.start * kind.itemsize
            read_rows(self.path, begin, width, stride, target, self.file)
        return values


@dataclass(frozen=True, slots=True)
class TensorBlocks:
    """A quantised tensor as it lies in the file: rows of whole blocks."""

    type_name: str  # ggml's: 'Q8_0', 'Q4_K', ...; or one of ours: 'I4_G128', ...
    block_elements: int
    block_bytes: int
    shape: tuple[int, ...]  # in elements
    rows: Array  # uint8 [product(shape[:-1]), shape[-1] // block_elements * block_bytes]


class Checkpoint(Closing, ABC):
    """An open model: configuration, tensors by Hugging Face name, tokenizer.

    Opening reads headers only; whether the tensors are those that a model needs is for its adapter
    to check. The object holds no file descriptor between calls, is safe to
    read from several threads, and after `close()` every tensor call raises `ClosedError`.
    """

    where: str  # names it in errors
    family: Family
    config: CheckpointConfig  # made by the family, whose own kind it is
    tokenizer_source: TokenizerSource

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The tensors present, in file order."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Raises `ModelLoadError` naming the tensor when it is absent."""

    @abstractmethod
    def record(self, name: str) -> TensorRecord | None:
        """Where its elements lie as they are wanted; None when it must go through `read`
        (quantised, or rows in another order). Raises `ModelLoadError` when absent."""

    @abstractmethod
    def read(self, name: str, dtype: str) -> Array:
        """A fresh contiguous array of the tensor as 'f32', 'f16' or 'bf16' (uint16 bits)."""

    def read_shard(self, name: str, dtype: str, part: Shard) -> Array:
        """The same for a run of rows or columns; a tensor with a record is not read beyond it."""
        record = self.record(name)
        if record is not None:
            return convert(record.read_shard(part), record.dtype, dtype)
        return np.ascontiguousarray(self.read(name, dtype)[part.index()])

    def block_type(self, name: str) -> str | None:
        """`type_name` of what `read_blocks` gives for all of a tensor; None: it is not quantised.
        Nothing is read."""
        self.shape(name)
        return None

    def read_blocks(self, name: str, part: Shard | None = None) -> TensorBlocks | None:
        """The blocks of a quantised tensor or of a part of it, rows in Hugging Face's order; None
        when it is none, or when the part does not consist of whole blocks."""
        self.shape(name)
        return None

    def read_integers(self, name: str) -> Array:
        """A tensor of integers, as int64; ModelLoadError when it is none."""
        self.shape(name)
        raise ModelLoadError(f"{self.where}: tensor {name!r} does not hold integers")
