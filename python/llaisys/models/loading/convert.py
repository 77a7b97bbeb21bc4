"""Dtype conversion in numpy. bf16 has no numpy type and is stored as uint16 bit patterns."""

from typing import Any

import numpy as np
import numpy.typing as npt

from llaisys.common.validation import check_choice, invalid_value

Array = npt.NDArray[Any]

STORAGE: dict[str, np.dtype[Any]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
}


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy type that holds elements of `dtype` ('f32' | 'f16' | 'bf16')."""
    return STORAGE[check_choice("dtype", dtype, tuple(STORAGE))]


# Large arrays are converted in cache-sized chunks, which is several times faster.
CHUNK_ELEMENTS = 1 << 18


def f32_to_bf16(values: Array) -> Array:
    """Round to nearest, ties to even; NaN stays NaN (quiet), infinities stay."""
    flat = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
    result = np.empty(flat.shape, dtype="<u2")
    for start in range(0, flat.size, CHUNK_ELEMENTS):
        bits = flat[start : start + CHUNK_ELEMENTS].view("<u4")
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        if is_nan.any():
            rounded[is_nan] = (bits[is_nan] >> 16) | 0x40
        result[start : start + CHUNK_ELEMENTS] = rounded
    return result.reshape(values.shape)


def bf16_to_f32(bits: Array) -> Array:
    wide: Array = np.asarray(bits, dtype="<u2").astype("<u4") << 16
    return wide.view("<f4")


def convert(values: Array, source: str, target: str) -> Array:
    """Convert an array of `source` elements to `target` elements of the same shape."""
    if values.dtype != storage_dtype(source):
        raise invalid_value(
            "values", values.dtype, f"an array of {storage_dtype(source)}, for {source}"
        )
    target_dtype = storage_dtype(target)
    if source == target:
        return values
    wide = bf16_to_f32(values) if source == "bf16" else values
    if target == "bf16":
        return f32_to_bf16(wide)
    with np.errstate(over="ignore"):  # f32 beyond the f16 range becomes infinity
        return wide.astype(target_dtype, copy=False)
