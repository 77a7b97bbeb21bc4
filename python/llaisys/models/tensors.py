"""Native tensors from numpy arrays."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.common.closing import closed_on_error
from llaisys.common.validation import invalid_value
from llaisys.libllaisys.handles import Tensor

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),  # the bits
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
}


def tensor_from(array: NDArray[Any], dtype: str) -> Tensor:
    """A native copy of an array with elements of this dtype (bf16: uint16 bits)."""
    dense = np.ascontiguousarray(array)
    if dense.dtype != _NUMPY_DTYPES[dtype]:
        raise invalid_value(
            "array", dense.dtype, f"of {_NUMPY_DTYPES[dtype]} elements, for {dtype}"
        )
    return tensor_from_blocks(dense, array.shape, dtype)


def tensor_from_blocks(rows: NDArray[Any], shape: tuple[int, ...], dtype: str) -> Tensor:
    """A native copy of a tensor of `shape` elements; `rows`: its elements, or its blocks by row."""
    tensor = Tensor.create(shape, dtype)
    with closed_on_error(tensor):
        dense = np.ascontiguousarray(rows)
        tensor.load(dense.ctypes.data, dense.nbytes)
    return tensor
