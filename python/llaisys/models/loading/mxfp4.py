"""Weights in MXFP4: blocks of 32 values of 4 bits (e2m1) that share a power of two (e8m0).

Twice a value is an integer from -12 to 12, so that a block of the native type Q5_0 (5 bits and an
f16 scale) holds the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.checkpoint import TensorBlocks, TensorRecord
from llaisys.models.loading.convert import CHUNK_ELEMENTS, Array, convert, storage_dtype
from llaisys.models.loading.family import Family
from llaisys.models.loading.safetensors_dir import SafetensorsCheckpoint
from llaisys.models.loading.shard import Shard

TYPE_NAME = "Q5_0"
SPAN = 32  # values of a block
_BLOCK_BYTES = 22  # of Q5_0
_GGML_BYTES = 17  # of a block of GGUF files: exponent, then nibbles of values j and j + 16
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_STORED = ("blocks", "scales")
_LARGEST_EXPONENT = 143  # 2^15, the largest power of two of f16, and 128


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """Value j of block b of row i is _DOUBLED[code] * 2^(exponents[i, b] - 128)."""

    codes: Array  # uint8 [n, k / 32, 16]: two nibbles per byte
    exponents: Array  # uint8 [n, k / 32]
    is_interleaved: bool  # a byte has values 2j and 2j + 1, otherwise j and j + 16

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * SPAN

    def cut(self, shard: Shard) -> Mxfp4Weight | None:
        """A range of rows or columns; None: it splits blocks."""
        if shard.dim == 1:
            if shard.start % SPAN or shard.stop % SPAN:
                return None
            shard = Shard(1, shard.start // SPAN, shard.stop // SPAN)
        return Mxfp4Weight(shard.cut(self.codes), shard.cut(self.exponents), self.is_interleaved)

    def _doubled(self, rows: slice) -> Array:
        """int8 [rows, k / 32, 32]"""
        codes = self.codes[rows]
        result = np.empty((*codes.shape[:2], SPAN), np.int8)
        if self.is_interleaved:
            result[..., 0::2], result[..., 1::2] = _DOUBLED[codes & 15], _DOUBLED[codes >> 4]
        else:
            result[..., :16], result[..., 16:] = _DOUBLED[codes & 15], _DOUBLED[codes >> 4]
        return result

    def _chunks(self) -> list[slice]:
        n, k = self.shape
        step = max(1, CHUNK_ELEMENTS // k)
        return [slice(start, start + step) for start in range(0, n, step)]

    def values(self, dtype: str) -> Array:
        """Dequantised values, [n, k]."""
        n, k = self.shape
        result = np.empty((n, k), storage_dtype(dtype))
        for rows in self._chunks():
            scales = np.ldexp(np.float32(1), self.exponents[rows].astype(np.int32) - 128)
            chunk = self._doubled(rows) * scales[..., None]
            result[rows] = convert(chunk.reshape(-1, k), "f32", dtype)
        return result

    def blocks(self, what: str) -> TensorBlocks:
        """The same values in blocks of Q5_0; `what`: the name of the tensor in errors."""
        if self.exponents.size and self.exponents.max() > _LARGEST_EXPONENT:
            raise ModelLoadError(f"{what}: a scale is above 32768 or NaN")
        n, k = self.shape
        result = np.empty((n, k // SPAN, _BLOCK_BYTES), np.uint8)
        for rows in self._chunks():
            q = (self._doubled(rows) + 16).view(np.uint8)
            scales = np.ldexp(np.float32(1), self.exponents[rows].astype(np.int32) - 128)
            into = result[rows]
            into[..., :2] = scales.astype("<f2")[..., None].view(np.uint8)
            into[..., 2:6] = np.packbits(q >> 4, axis=-1, bitorder="little")
            into[..., 6:] = q[..., :16] & 15 | q[..., 16:] << 4
        return TensorBlocks(TYPE_NAME, SPAN, _BLOCK_BYTES, (n, k), result.reshape(n, -1))


def from_ggml(rows: Array) -> Mxfp4Weight:
    """Rows of blocks of a GGUF file, uint8."""
    blocks = rows.reshape(len(rows), -1, _GGML_BYTES)
    return Mxfp4Weight(blocks[..., 1:], blocks[..., 0], is_interleaved=False)


class Mxfp4Checkpoint(SafetensorsCheckpoint):
    """A directory of gpt-oss: `*_blocks` u8 [experts, rows, k / 32, 16] and `*_scales` u8 [experts,
    rows, k / 32]. The experts of a layer are presented as one matrix each of gate_proj, up_proj
    (in turn the rows of gate_up_proj) and down_proj."""

    def __init__(self, directory: Path, family: Family, config: Any) -> None:
        super().__init__(directory, family, config)
        self._parts: dict[str, tuple[str, slice]] = {}  # name -> stored tensor and its rows
        for name in self._tensors:
            if not name.endswith("_blocks"):
                continue
            stored = name.removesuffix("_blocks")
            block, kind = stored.rsplit(".", 1)
            if kind == "gate_up_proj":
                self._parts[f"{block}.gate_proj.weight"] = stored, slice(0, None, 2)
                self._parts[f"{block}.up_proj.weight"] = stored, slice(1, None, 2)
            else:
                self._parts[f"{block}.{kind}.weight"] = stored, slice(None)

    def names(self) -> tuple[str, ...]:
        stored = {f"{name}_{kind}" for name, _ in self._parts.values() for kind in _STORED}
        return (*(name for name in self._tensors if name not in stored), *self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._parts:
            return super().shape(name)
        experts, rows, blocks, _ = self._records(name)[0].shape
        return experts * len(range(rows)[self._parts[name][1]]), blocks * SPAN

    def record(self, name: str) -> TensorRecord | None:
        return None if name in self._parts else super().record(name)

    def read(self, name: str, dtype: str) -> Array:
        storage_dtype(dtype)  # rejects an unknown name before any read
        return self.weight(name).values(dtype) if name in self._parts else super().read(name, dtype)

    def block_type(self, name: str) -> str | None:
        return TYPE_NAME if name in self._parts else super().block_type(name)

    def read_blocks(self, name: str, shard: Shard | None = None) -> TensorBlocks | None:
        if name not in self._parts:
            return super().read_blocks(name, shard)
        weight: Mxfp4Weight | None = self.weight(name)
        if weight is not None and shard is not None:
            weight = weight.cut(shard)
        return None if weight is None else weight.blocks(f"{self.where}: tensor {name!r}")

    def _records(self, name: str) -> tuple[TensorRecord, TensorRecord]:
        """Blocks and scales; raises unless they are consistent."""
        stored, _ = self._parts[name]
        blocks, scales = self._find(f"{stored}_blocks"), self._find(f"{stored}_scales")
        is_good = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, SPAN // 2)
        if not is_good or {blocks.dtype, scales.dtype} != {"U8"}:
            raise ModelLoadError(
                f"{blocks.path}: tensor {blocks.name!r} is {blocks.dtype} of shape "
                f"{list(blocks.shape)} with scales {scales.dtype} of shape {list(scales.shape)}; "
                "expected U8 [experts, rows, n, 16] and [experts, rows, n]"
            )
        return blocks, scales

    def weight(self, name: str) -> Mxfp4Weight:
        found = []
        for record in self._records(name):
            chosen = record.read()[:, self._parts[name][1]]
            found.append(chosen.reshape(-1, *chosen.shape[2:]))
        return Mxfp4Weight(found[0], found[1], is_interleaved=True)
