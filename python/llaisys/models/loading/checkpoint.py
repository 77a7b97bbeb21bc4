"""`Checkpoint`: format-independent access to the files of a model."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from llaisys.common.closing import Closing
from llaisys.common.errors import ClosedError, ModelLoadError
from llaisys.models.loading.convert import STORAGE, Array, convert, storage_dtype
from llaisys.models.loading.family import CheckpointConfig, Family
from llaisys.models.loading.file_range import FileIdentity, read_range, read_rows
from llaisys.models.loading.shard import Shard
from llaisys.tokenization.source import TokenizerSource

# Elements of safetensors files that are not weights but parts of them.
CODES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),
}
# GGUF key after the architecture -> field of a config
SIZES = {
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "block_count": "num_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_heads",
    "attention.head_count_kv": "num_kv_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# general.file_type of GGUF files (llama_ftype)
FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K"},
    **{11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S"},
    **{17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS"},
    **{23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S"},
    **{29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0"},
    **{38: "MXFP4_MOE", 39: "NVFP4"},
}


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Row-major little-endian elements at [offset, offset + nbytes) of the file at `path`.

    The range was inside the file when the header was read; reads check again.
    """

    name: str  # Hugging Face tensor name
    dtype: str  # 'f32' | 'f16' | 'bf16', or the file's name of a dtype that cannot be a weight
    shape: tuple[int, ...]
    path: Path
    offset: int  # from the start of the file; any alignment
    nbytes: int  # product(shape) * element size
    file: FileIdentity  # the file whose header was read

    def read_into(self, target: memoryview) -> None:
        """Read `nbytes` bytes; `ModelLoadError` when the file has changed."""
        read_range(self.path, self.offset, target, self.file)

    def read(self) -> Array:
        """The elements as they are stored."""
        kind = storage_dtype(self.dtype) if self.dtype in STORAGE else CODES[self.dtype]
        values = np.empty(self.shape, kind)
        self.read_into(values.reshape(-1).view(np.uint8).data)
        return values

    def rows(self, shard: Shard) -> Self:
        """The record of a range of rows (dimension 0)."""
        size = self.nbytes // self.shape[0] if self.shape[0] else 0  # per row
        return replace(
            self,
            shape=shard.shape_in(self.shape),
            offset=self.offset + shard.start * size,
            nbytes=(shard.stop - shard.start) * size,
        )

    def read_shard(self, shard: Shard) -> Array:
        """The elements of a shard; reads no other bytes."""
        shape, kind = shard.shape_in(self.shape), storage_dtype(self.dtype)
        values = np.empty(shape, kind)
        target = values.reshape(-1).view(np.uint8).data
        if shard.dim == 0:
            self.rows(shard).read_into(target)
        else:
            width, stride = shape[-1] * kind.itemsize, self.shape[-1] * kind.itemsize
            begin = self.offset + shard.start * kind.itemsize
            read_rows(self.path, begin, width, stride, target, self.file)
        return values


@dataclass(frozen=True, slots=True)
class TensorBlocks:
    """A quantised tensor as stored in the file: rows of whole blocks."""

    type_name: str  # ggml type 'Q8_0', 'Q4_K', ..., or 'I4_G128', ... of this library
    block_elements: int
    block_bytes: int
    shape: tuple[int, ...]  # in elements
    rows: Array  # uint8 [product(shape[:-1]), shape[-1] // block_elements * block_bytes]


class Checkpoint(Closing, ABC):
    """An open model: configuration, tensors by Hugging Face name, tokenizer.

    Opening reads headers only; the adapter checks that the required tensors exist. Holds no file
    descriptor between calls. Reads are thread-safe. After `close()` every tensor call raises
    `ClosedError`.
    """

    where: str  # its name in errors
    family: Family
    config: CheckpointConfig  # of the family's config type
    tokenizer_source: TokenizerSource
    gguf_metadata: Mapping[str, str | int | float | bool | None] = MappingProxyType({})
    _tensors: Mapping[str, Any]  # the tensors of the files by Hugging Face name, in file order
    _is_closed = False

    def metadata(self) -> dict[str, str | int | float | bool | None]:
        """Scalars that describe the model, under GGUF's keys, with general.parameter_count. Of a
        GGUF file those of its header, of other files those that the config has."""
        kind = self.config.model_type
        sizes = {f"{kind}.{key}": getattr(self.config, name, 0) for key, name in SIZES.items()}
        count = sum(prod(shape) for _, shape in self.family.tensors(self.config))
        found = {"general.architecture": kind, **{k: v for k, v in sizes.items() if v}}
        return {"general.parameter_count": count, **(self.gguf_metadata or found)}

    def weight_type(self) -> str:
        """The type of most of the elements: 'BF16', 'Q8_0', ...; of a GGUF file the name of
        general.file_type, like 'Q4_K_M'."""
        number = self.gguf_metadata.get("general.file_type")
        named = FILE_TYPES.get(number) if isinstance(number, int) else None
        if named is not None:
            return named
        counts: Counter[str] = Counter()
        present = set(self.names())
        for name, shape in self.family.tensors(self.config):
            if name in present:
                counts[self.block_type(name) or self.config.dtype] += prod(shape)
        return counts.most_common(1)[0][0].upper() if counts else ""

    def names(self) -> tuple[str, ...]:
        """The tensors present, in file order."""
        return tuple(self._tensors)

    def _find(self, name: str) -> Any:
        """The value of `_tensors`; `ModelLoadError` when it is missing."""
        if self._is_closed:
            raise ClosedError(f"{self.where}: the checkpoint is closed")
        if name not in self._tensors:
            raise ModelLoadError(f"{self.where}: tensor {name!r} is missing")
        return self._tensors[name]

    def close(self) -> None:
        self._is_closed = True
        self._tensors = {}

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; `ModelLoadError` when it is missing."""

    @abstractmethod
    def record(self, name: str) -> TensorRecord | None:
        """Location of the elements in the file; None when they need `read` (quantised, or permuted
        rows). `ModelLoadError` when the tensor is missing."""

    def records(self, name: str, shard: Shard | None = None) -> list[TensorRecord] | None:
        """Locations of the rows of a tensor, or of a shard of rows, in order; None when they need
        `read` or `read_shard`."""
        record = self.record(name)
        if record is None or (shard is not None and shard.dim != 0):
            return None
        return [record if shard is None else record.rows(shard)]

    @abstractmethod
    def read(self, name: str, dtype: str) -> Array:
        """A new contiguous array of the tensor as 'f32', 'f16' or 'bf16' (uint16 bits)."""

    def read_shard(self, name: str, dtype: str, shard: Shard) -> Array:
        """Like `read` for a shard; with a record, reads only the bytes of the shard."""
        record = self.record(name)
        if record is not None:
            return convert(record.read_shard(shard), record.dtype, dtype)
        return np.ascontiguousarray(shard.cut(self.read(name, dtype)))

    def block_type(self, name: str) -> str | None:
        """`TensorBlocks.type_name` of a tensor; None: not quantised. Reads no data."""
        self.shape(name)
        return None

    def read_blocks(self, name: str, shard: Shard | None = None) -> TensorBlocks | None:
        """The blocks of a quantised tensor or shard, rows in Hugging Face order; None when it is
        not quantised, or when the shard splits blocks."""
        self.shape(name)
        return None

    def read_integers(self, name: str) -> Array:
        """An integer tensor as int64; ModelLoadError for other dtypes."""
        self.shape(name)
        raise ModelLoadError(f"{self.where}: tensor {name!r} does not hold integers")


def check_coverage(checkpoint: Checkpoint) -> list[str]:
    """Return the names of all tensors that the model needs; other tensors are ignored.

    Raises `ModelLoadError` naming the first missing, misshaped or unreadable tensor.
    """
    where = checkpoint.where
    present = set(checkpoint.names())
    names = []
    for name, shape in checkpoint.family.tensors(checkpoint.config):
        if name not in present:
            raise ModelLoadError(f"{where}: tensor {name!r} is missing")
        found = checkpoint.shape(name)
        if found != shape:
            raise ModelLoadError(
                f"{where}: tensor {name!r} has shape {list(found)}, the config requires "
                f"{list(shape)}"
            )
        checkpoint.record(name)  # raises for an element type that cannot be read
        names.append(name)
    return names
