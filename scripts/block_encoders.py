"""Encoders of the GGUF block types that the gguf library cannot quantize.

Scales are the plain ones of each group (range over levels), not the searched ones of llama.cpp.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)


def _half(values: Array) -> Array:
    """f16 values [n] as bytes [n, 2]."""
    return np.ascontiguousarray(values.astype("<f2")).view(np.uint8).reshape(len(values), 2)


def _quotient(values: Array, by: Array) -> Array:
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


def _with_minimums(x: Array, groups: int, levels: int, largest: int) -> tuple[Array, ...]:
    """(q, scales, minimums, d, dmin) of blocks x [n, 256]: value d * scale * q - dmin * minimum."""
    parts = x.reshape(len(x), groups, -1)
    low = np.minimum(parts.min(2), 0)
    steps = (np.maximum(parts.max(2), 0) - low) / levels
    d = (steps.max(1) / largest).astype("<f2").astype(np.float32)
    dmin = (-low.min(1) / largest).astype("<f2").astype(np.float32)
    scales = np.clip(np.rint(_quotient(steps, d[:, None] + 0 * steps)), 0, largest)
    minimums = np.clip(np.rint(_quotient(-low, dmin[:, None] + 0 * low)), 0, largest)
    shifted = parts + (dmin[:, None] * minimums)[..., None]
    step = (d[:, None] * scales)[..., None]
    q = np.clip(np.rint(_quotient(shifted, step + 0 * shifted)), 0, levels)
    kind = np.uint8
    return q.reshape(x.shape).astype(kind), scales.astype(kind), minimums.astype(kind), d, dmin


def _signed(x: Array, largest: int, top: int) -> tuple[Array, Array, Array]:
    """(q, scales, d) of blocks x [n, 256] in groups of 16: value d * scale * q, |q| <= top."""
    parts = x.reshape(len(x), 16, 16)
    steps = np.abs(parts).max(2) / top
    d = (steps.max(1) / largest).astype("<f2").astype(np.float32)
    scales = np.clip(np.rint(_quotient(steps, d[:, None] + 0 * steps)), 0, largest)
    step = (d[:, None] * scales)[..., None]
    q = np.clip(np.rint(_quotient(parts, step + 0 * parts)), -top - 1, top)
    return q.reshape(x.shape).astype(np.int8), scales.astype(np.int8), d


def _six_bits(scales: Array, minimums: Array) -> Array:
    """Eight scales and minimums of 6 bits in 12 bytes."""
    low = scales[:, :4] | scales[:, 4:] >> 4 << 6
    middle = minimums[:, :4] | minimums[:, 4:] >> 4 << 6
    return np.concatenate([low, middle, scales[:, 4:] & 15 | minimums[:, 4:] << 4], 1)


def _nibbles(q: Array) -> Array:
    pairs = q.reshape(len(q), 4, 2, 32)
    return (pairs[:, :, 0] & 15 | pairs[:, :, 1] << 4).reshape(len(q), 128)


def _two_bits(q: Array) -> Array:
    quarters = q.reshape(len(q), 2, 4, 32) & 3
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(quarters << shifts, 2).reshape(len(q), 64)


def _bits(q: Array, bit: int) -> Array:
    """Bit `bit` of value 32 j + l as bit j of byte l."""
    flags = (q.reshape(len(q), 8, 32) >> bit & 1) << np.arange(8, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(flags, 1)


def q4_k(x: Array) -> Array:
    q, scales, minimums, d, dmin = _with_minimums(x, 8, 15, 63)
    return np.concatenate([_half(d), _half(dmin), _six_bits(scales, minimums), _nibbles(q)], 1)


def q5_k(x: Array) -> Array:
    q, scales, minimums, d, dmin = _with_minimums(x, 8, 31, 63)
    packed = _six_bits(scales, minimums)
    return np.concatenate([_half(d), _half(dmin), packed, _bits(q, 4), _nibbles(q & 15)], 1)


def q2_k(x: Array) -> Array:
    q, scales, minimums, d, dmin = _with_minimums(x, 16, 3, 15)
    return np.concatenate([scales | minimums << 4, _two_bits(q), _half(d), _half(dmin)], 1)


def q6_k(x: Array) -> Array:
    signed, scales, d = _signed(x, 127, 31)
    q = (signed + 32).astype(np.uint8).reshape(len(x), 2, 4, 32)
    low = np.stack([q[:, :, 0] & 15 | q[:, :, 2] << 4, q[:, :, 1] & 15 | q[:, :, 3] << 4], 2)
    high = _two_bits((q >> 4).reshape(len(x), 256))
    return np.concatenate([low.reshape(len(x), 128), high, scales.view(np.uint8), _half(d)], 1)


def q3_k(x: Array) -> Array:
    signed, scales, d = _signed(x, 31, 3)
    q, six = (signed + 4).astype(np.uint8), (scales + 32).astype(np.uint8)
    low = six[:, :8] & 15 | six[:, 8:] << 4
    high = (six >> 4).reshape(len(x), 4, 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    packed = np.concatenate([low, np.bitwise_or.reduce(high, 1)], 1)
    return np.concatenate([_bits(q, 2), _two_bits(q), packed, _half(d)], 1)


def iq4_nl(x: Array) -> Array:
    d = (np.abs(x).max(1) / 127).astype("<f2").astype(np.float32)
    scaled = _quotient(x, d[:, None] + 0 * x)
    q = np.abs(scaled[..., None] - IQ4_NL_VALUES).argmin(2).astype(np.uint8)
    return np.concatenate([_half(d), q[:, :16] | q[:, 16:] << 4], 1)


ENCODERS = {"Q4_K": q4_k, "Q5_K": q5_k, "Q2_K": q2_k, "Q6_K": q6_k, "Q3_K": q3_k, "IQ4_NL": iq4_nl}


def encode(values: Array, kind: str) -> Array:
    """Blocks uint8 [n, bytes per row] of f32 values [n, k]."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quantize

    if kind not in ENCODERS:
        return np.asarray(quantize(values, GGMLQuantizationType[kind]))
    elements, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return ENCODERS[kind](values.reshape(-1, elements)).reshape(len(values), -1)
