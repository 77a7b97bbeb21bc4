"""include/llaisys/tensor.h"""

from __future__ import annotations

from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

MAX_DIMS = 6

_SIZES = POINTER(c_int64)
_RESULT = POINTER(c_void_p)

FUNCTIONS: list[tuple[str, Any, list[Any]]] = [
    ("llaisysTensorCreate", c_int32, [_SIZES, c_int32, c_int, c_int, c_int32, _RESULT]),
    ("llaisysTensorMap", c_int32, [c_char_p, c_uint64, _SIZES, c_int32, c_int, _RESULT]),
    ("llaisysTensorDestroy", c_int32, [c_void_p]),
    ("llaisysTensorData", c_void_p, [c_void_p]),
    ("llaisysTensorNdim", c_int32, [c_void_p]),
    ("llaisysTensorShape", c_int32, [c_void_p, _SIZES]),
    ("llaisysTensorStrides", c_int32, [c_void_p, _SIZES]),
    ("llaisysTensorDataType", c_int, [c_void_p]),
    ("llaisysTensorIsContiguous", c_int32, [c_void_p]),
    ("llaisysTensorIsMapped", c_int32, [c_void_p]),
    ("llaisysTensorLoad", c_int32, [c_void_p, c_void_p, c_size_t]),
    ("llaisysTensorStore", c_int32, [c_void_p, c_void_p, c_size_t]),
    ("llaisysTensorView", c_int32, [c_void_p, _SIZES, c_int32, _RESULT]),
    ("llaisysTensorSlice", c_int32, [c_void_p, c_int32, c_int64, c_int64, _RESULT]),
    ("llaisysTensorPermute", c_int32, [c_void_p, POINTER(c_int32), _RESULT]),
    ("llaisysTensorContiguous", c_int32, [c_void_p, _RESULT]),
]
