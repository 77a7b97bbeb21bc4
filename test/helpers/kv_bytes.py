"""Naive 8-bit KV caches in numpy, as src/ops/kv_layer.hpp describes them."""

from __future__ import annotations

import numpy as np
from native_helpers import Array

LARGEST = {"i8": np.float32(127), "f8_e4m3": np.float32(448)}


def e4m3_values() -> Array:
    """Values of the codes 0 to 126: ascending from 0 to 448."""
    codes = np.arange(127)
    exponents, mantissas = codes >> 3, codes & 7
    normal = (1 + mantissas / 8) * 2.0 ** (exponents - 7)
    return np.where(exponents > 0, normal, mantissas / 8 * 2.0**-6).astype(np.float32)


E4M3 = e4m3_values()


def to_e4m3(values: Array) -> Array:
    """Codes of values up to 448 in magnitude, rounded to nearest even."""
    magnitudes = np.abs(values).astype(np.float64)
    above = np.clip(np.searchsorted(E4M3, magnitudes), 1, 126)
    low, high = E4M3[above - 1].astype(np.float64), E4M3[above].astype(np.float64)
    middle = (low + high) / 2
    is_high = (magnitudes > middle) | ((magnitudes == middle) & (above % 2 == 0))
    codes = np.where(is_high, above, above - 1).astype(np.uint8)
    return np.where(np.signbit(values), codes | 0x80, codes).astype(np.uint8)


def from_e4m3(codes: Array) -> Array:
    magnitudes = E4M3[codes & 0x7F]
    return np.where(codes & 0x80, -magnitudes, magnitudes).astype(np.float32)


def quantised(values: Array, dtype: str) -> tuple[Array, Array]:
    """Bytes [slots, heads, d] (u8) and scales f32 [slots, heads] of f32 values."""
    with np.errstate(all="ignore"):
        largest = np.abs(values).max(-1)
        is_finite = np.isfinite(values).all(-1)
        is_zero = ~is_finite | (largest < np.float32(2.0**-100))
        scales = np.where(is_zero, np.float32(0), largest / LARGEST[dtype])
        factors = np.where(is_zero, np.float32(0), LARGEST[dtype] / largest)[..., None]
        scaled = np.where(is_zero[..., None], np.float32(0), values * factors)
    stored = np.rint(scaled).astype(np.int8).view(np.uint8) if dtype == "i8" else to_e4m3(scaled)
    return stored, np.where(is_finite, scales, np.float32(np.nan)).astype(np.float32)


def dequantised(stored: Array, scales: Array, dtype: str) -> Array:
    real = stored.view(np.int8).astype(np.float32) if dtype == "i8" else from_e4m3(stored)
    return real * scales[..., None]


def cuda_layout(stored: Array, scales: Array) -> Array:
    """Bytes of a cache on CUDA, u8 [slots, heads, d + 4]."""
    slots, heads, d = stored.shape
    tail = np.ascontiguousarray(scales.T).view(np.uint8)
    return np.concatenate([stored.ravel(), tail.ravel()]).reshape(slots, heads, d + 4)
