"""Weights of 4 or 8 bits with scales and zero points per group of a row, and their layouts in GPTQ,
AWQ and compressed-tensors. Values are repacked, never requantized."""

from dataclasses import dataclass, replace
from math import gcd
from typing import Self

import numpy as np

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.checkpoint import TensorBlocks
from llaisys.models.loading.convert import Array
from llaisys.models.loading.shard import Shard

SPANS = (128, 32)  # values per block; the larger is preferred because it has fewer scales
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word, lowest first


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Value [i, j] is scales[i, g] * (q[i, j] - zeros[i, g]) with g = j // group."""

    q: Array  # uint8: 4 bits [n, k / 2], even value in the low nibble; 8 bits [n, k], int8 bits
    scales: Array  # f32 [n, groups]
    zeros: Array  # int16 [n, groups]
    bits: int  # 4: q is 0 to 15; 8: -128 to 127
    group: int  # values per scale
    # int32 [k]: group of each column, instead of j // group; such a weight has only `values`.
    order: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[1] * 8 // self.bits

    def values(self) -> Array:
        """Dequantised values, f32 [n, k]."""
        n, k = self.shape
        if self.bits == 8:
            q = self.q.view(np.int8).astype(np.float32)
        else:
            q = np.empty((n, k), np.float32)
            q[:, 0::2], q[:, 1::2] = self.q & 15, self.q >> 4
        groups = np.arange(k) // self.group if self.order is None else self.order
        return np.asarray((q - self.zeros[:, groups]) * self.scales[:, groups], np.float32)

    def cut(self, shard: Shard) -> Self:
        """A range of rows or columns. A group that the range splits becomes several smaller groups
        with the same scale."""
        if shard.dim == 0:
            rows = slice(shard.start, shard.stop)
            return replace(self, q=self.q[rows], scales=self.scales[rows], zeros=self.zeros[rows])
        group = gcd(self.group, shard.start, shard.stop)
        columns = slice(shard.start * self.bits // 8, shard.stop * self.bits // 8)
        groups = slice(shard.start // group, shard.stop // group)
        times = self.group // group
        return replace(
            self,
            q=self.q[:, columns],
            scales=self.scales.repeat(times, 1)[:, groups],
            zeros=self.zeros.repeat(times, 1)[:, groups],
            group=group,
        )

    def blocks(self, name: str) -> TensorBlocks:
        """The same values as blocks of the native library (include/llaisys/types.h)."""
        n, k = self.shape
        span = span_of(k, self.group, f"tensor {name!r} of shape {[n, k]}")
        count, nbytes = k // span, 6 + span * self.bits // 8
        rows = np.empty((n, count, nbytes), np.uint8)
        groups = np.arange(count) * span // self.group
        rows[:, :, :4] = _bytes(self.scales[:, groups].astype("<f4"))
        rows[:, :, 4:6] = _bytes(self.zeros[:, groups].astype("<f2"))
        rows[:, :, 6:] = self.q.reshape(n, count, -1)
        return TensorBlocks(
            f"I{self.bits}_G{span}", span, nbytes, (n, k), rows.reshape(n, count * nbytes)
        )

    def channel_blocks(self, name: str) -> TensorBlocks:
        """The same values as blocks of i8_channel: 8 bits, zero points 0, one scale per row."""
        n, k = self.shape
        if self.zeros.any():
            raise ModelLoadError(f"tensor {name!r} is symmetric but has a zero point that is not 0")
        span_of(k, k, f"tensor {name!r} of shape {[n, k]}")
        rows = np.empty((n, k // CHANNEL_SPAN, 4 + CHANNEL_SPAN), np.uint8)
        rows[:, :, :4] = _bytes(self.scales[:, :1].astype("<f4"))
        rows[:, :, 4:] = self.q.reshape(n, -1, CHANNEL_SPAN)
        return TensorBlocks(CHANNEL, CHANNEL_SPAN, 4 + CHANNEL_SPAN, (n, k), rows.reshape(n, -1))


CHANNEL = "I8_CHANNEL"
CHANNEL_SPAN = 32
Q8_0_SPAN = 32


def device_blocks(blocks: TensorBlocks, device: str, name: str) -> TensorBlocks:
    """The same values as blocks that the device has: i8_channel has group scales on a GPU."""
    if blocks.type_name != CHANNEL or device == "cpu":
        return blocks
    n = len(blocks.rows)
    rows = blocks.rows.reshape(n, -1, 4 + CHANNEL_SPAN)
    scales = np.ascontiguousarray(rows[:, 0, :4]).view("<f4")
    q = np.ascontiguousarray(rows[:, :, 4:]).reshape(n, -1)
    made = GroupedWeight(q, scales, np.zeros((n, 1), np.int16), 8, q.shape[1]).blocks(name)
    return replace(made, shape=blocks.shape)


def q8_0_blocks(values: Array) -> TensorBlocks:
    """Values f32 [n, k] rounded to Q8_0."""
    n, k = values.shape
    groups = values.reshape(n, k // Q8_0_SPAN, Q8_0_SPAN)
    scales = (np.abs(groups).max(2) / 127).astype("<f2")
    wide = scales.astype(np.float32)
    inverse = np.divide(1, wide, out=np.zeros_like(wide), where=wide > 0)
    rows = np.empty((n, k // Q8_0_SPAN, 2 + Q8_0_SPAN), np.uint8)
    rows[:, :, :2] = scales[..., None].view(np.uint8)
    q = np.clip(np.rint(groups * inverse[..., None]), -127, 127).astype(np.int8)
    rows[:, :, 2:] = q.view(np.uint8)
    return TensorBlocks("Q8_0", Q8_0_SPAN, 2 + Q8_0_SPAN, (n, k), rows.reshape(n, -1))


def span_of(columns: int, group: int, what: str) -> int:
    """Values per block of the native library for rows of this length; `what`: their name in
    errors."""
    for span in SPANS:
        if columns % span == 0 and group % span == 0:
            return span
    raise ModelLoadError(
        f"{what} has {columns} columns in groups of {group}; both must be multiples of {SPANS[-1]}"
    )


def _bytes(values: Array) -> Array:
    """[n, groups] as bytes [n, groups, size]."""
    dense = np.ascontiguousarray(values)
    return dense.view(np.uint8).reshape(*dense.shape, -1)


def _signed(q: Array, zeros: Array, bits: int) -> tuple[Array, Array]:
    """Unsigned 8-bit values and zero points as signed ones (minus 128)."""
    return (q, zeros) if bits == 4 else (q ^ 0x80, zeros - 128)


def from_gptq(
    qweight: Array, qzeros: Array, scales: Array, bits: int, group: int, zero_offset: int
) -> GroupedWeight:
    """qweight int32 [k * bits / 32, n], lowest bits first; qzeros int32 [groups, n * bits / 32],
    stored minus zero_offset; scales f32 [groups, n]."""
    words, n = qweight.shape
    q = np.ascontiguousarray(qweight.T).view(np.uint8).reshape(n, words * 4)
    zeros = (unpack_words(qzeros, bits) + zero_offset).T
    q, zeros = _signed(q, zeros, bits)
    return GroupedWeight(q, np.ascontiguousarray(scales.T), zeros, bits, group)


def from_awq(qweight: Array, qzeros: Array, scales: Array, group: int) -> GroupedWeight:
    """qweight int32 [k, n / 8], qzeros int32 [groups, n / 8], scales f32 [groups, n]; 4 bits, eight
    columns per word in AWQ's order."""
    k, words = qweight.shape
    q = np.empty((words * 8, k // 2), np.uint8)
    stored = qweight.view(np.uint32)
    zeros = np.empty((words * 8, len(qzeros)), np.int16)
    for nibble, column in enumerate(_AWQ_COLUMNS):
        values = (stored >> np.uint32(4 * nibble)).astype(np.uint8) & 15
        q[column::8] = (values[0::2] | values[1::2] << 4).T
        zeros[column::8] = (qzeros.view(np.uint32) >> np.uint32(4 * nibble) & 15).T
    return GroupedWeight(q, np.ascontiguousarray(scales.T), zeros, 4, group)


def from_packed(
    packed: Array, zeros: Array | None, scales: Array, bits: int, group: int
) -> GroupedWeight:
    """compressed-tensors 'pack-quantized': packed int32 [n, k * bits / 32] of q + 2^(bits - 1),
    zeros int32 [ceil(n * bits / 32), groups] packed along rows, scales f32 [n, groups]."""
    n, middle = len(packed), 1 << (bits - 1)
    q = packed.view(np.uint8)
    wide = np.full(scales.shape, middle, np.int16)
    if zeros is not None:
        wide = unpack_words(np.ascontiguousarray(zeros.T), bits).T[:n]
    q, wide = _signed(q, wide, bits)
    return GroupedWeight(q, scales, wide, bits, group)


def from_bytes(q: Array, zeros: Array | None, scales: Array, group: int) -> GroupedWeight:
    """compressed-tensors 'int-quantized': q int8 [n, k], zeros int8 and scales f32 [n, groups]."""
    wide = np.zeros(scales.shape, np.int16) if zeros is None else zeros.astype(np.int16)
    return GroupedWeight(q.view(np.uint8), scales, wide, 8, group)


def unpack_words(words: Array, bits: int) -> Array:
    """int32 [rows, n * bits / 32] as int16 [rows, n], the lowest bits first."""
    if bits == 8:
        return words.view(np.uint8).astype(np.int16)
    pairs = words.view(np.uint8)
    values = np.empty((pairs.shape[0], pairs.shape[1] * 2), np.int16)
    values[:, 0::2], values[:, 1::2] = pairs & 15, pairs >> 4
    return values
