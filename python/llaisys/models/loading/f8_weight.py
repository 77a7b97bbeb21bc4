"""Weights in FP8 (e4m3) with scales per tensor, row or block of 128 x 128 values."""

from dataclasses import dataclass

import numpy as np

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.checkpoint import TensorBlocks
from llaisys.models.loading.convert import Array
from llaisys.models.loading.shard import Shard

TYPE_NAME = "F8_G128"
SPAN = 128  # values of a block of the native library


def _e4m3_values() -> Array:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, (codes & 7) / 8
    sizes = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - 7), mantissa * 2.0**-6)
    sizes[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


VALUES = _e4m3_values()  # of the 256 codes


@dataclass(frozen=True, slots=True)
class F8Weight:
    """Value [i, j] is VALUES[q[i, j]] * scales[i, j // 128]."""

    q: Array  # uint8 [n, k]
    scales: Array  # f32 [n, ceil(k / 128)]

    def values(self) -> Array:
        """Dequantised values, f32 [n, k]."""
        columns = np.arange(self.q.shape[1]) // SPAN
        return np.asarray(VALUES[self.q] * self.scales[:, columns], np.float32)

    def blocks(self, shard: Shard | None) -> TensorBlocks | None:
        """Blocks of the native library (include/llaisys/types.h); None: the shard splits blocks."""
        n, k = self.q.shape
        shard = shard or Shard(0, 0, n)
        if k % SPAN or (shard.dim == 1 and (shard.start % SPAN or shard.stop % SPAN)):
            return None
        q = self.q[shard.index()]
        spans = Shard(1, shard.start // SPAN, shard.stop // SPAN) if shard.dim == 1 else shard
        scales = self.scales[spans.index()]
        n, k = q.shape
        rows = np.empty((n, k // SPAN, 4 + SPAN), np.uint8)
        rows[:, :, :4] = np.ascontiguousarray(scales, "<f4")[..., None].view(np.uint8)
        rows[:, :, 4:] = q.reshape(n, -1, SPAN)
        return TensorBlocks(TYPE_NAME, SPAN, 4 + SPAN, (n, k), rows.reshape(n, -1))


def from_scales(q: Array, scales: Array, block: tuple[int, int], what: str) -> F8Weight:
    """q: uint8 [n, k]; scales f32: one, [n] or [n, 1] by row, or one per `block`. `what`: the name
    of the tensor in errors."""
    n, k = q.shape
    if not np.isfinite(scales).all():
        raise ModelLoadError(f"{what}: a scale is not finite")
    if ((q & 127) == 127).any():
        raise ModelLoadError(f"{what}: a value is NaN")
    spans = -(-k // SPAN)
    if scales.size == 1:
        wide = np.broadcast_to(scales.reshape(1, 1), (n, spans))
    elif scales.size == n and scales.shape[0] == n:
        wide = np.broadcast_to(scales.reshape(n, 1), (n, spans))
    else:
        columns = np.arange(spans) * SPAN // block[1]
        wide = scales[np.arange(n) // block[0]][:, columns]
    return F8Weight(q, np.asarray(wide, np.float32))
