"""include/llaisys/types.h"""

from __future__ import annotations

from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_uint32
from typing import Any

ABI_VERSION = 17

DEVICE_CPU = 0
DEVICE_NVIDIA = 1
DEVICES = {"cpu": DEVICE_CPU, "nvidia": DEVICE_NVIDIA}
DEVICE_NAMES = {**DEVICES, "cuda": DEVICE_NVIDIA}  # names accepted from callers

DTYPES = {"f32": 1, "f16": 2, "bf16": 3, "i64": 4, "i32": 5, "i8": 6, "u8": 7, "f8_e4m3": 23}
# Block-quantised weights: ggml types, and group-quantised types for GPTQ, AWQ and others.
QUANTISED_DTYPES = {
    "q8_0": 8,
    "q4_0": 9,
    "q4_1": 10,
    "q5_0": 11,
    "q5_1": 12,
    "q4_k": 13,
    "q5_k": 14,
    "q6_k": 15,
    "q2_k": 16,
    "q3_k": 17,
    "iq4_nl": 18,
    "i4_g32": 19,
    "i4_g128": 20,
    "i8_g32": 21,
    "i8_g128": 22,
    "f8_g128": 24,
}
DTYPES |= QUANTISED_DTYPES
DTYPE_NAMES = {value: name for name, value in DTYPES.items()}
DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i8": 1, "u8": 1, "f8_e4m3": 1}
# Dtypes of the KV cache; q8 and fp8: 8 bits with one scale per head and token.
KV_DTYPES = {"f32": 1, "f16": 2, "bf16": 3, "q8": DTYPES["i8"], "fp8": DTYPES["f8_e4m3"]}
KV_SCALE_BYTES = 4

OK = 0
ERROR_INVALID = -1
ERROR_MEMORY = -2
ERROR_INTERNAL = -3
ERROR_UNSUPPORTED = -4
ERROR_IO = -5
DECODE_NO_KV_SLOT = 1
DECODE_ABORTED = 2


class LlaisysDataTypeTraits(Structure):
    _fields_ = (("block_elements", c_int32), ("block_bytes", c_int32))


# Name, result, arguments. Enumerations are C ints.
FUNCTIONS: list[tuple[str, Any, list[Any]]] = [
    ("llaisysAbiVersion", c_uint32, []),
    ("llaisysLastError", c_char_p, []),
    ("llaisysLastErrorCode", c_int32, []),
    ("llaisysDataTypeName", c_char_p, [c_int]),
    ("llaisysDataTypeGetTraits", c_int32, [c_int, POINTER(LlaisysDataTypeTraits)]),
]
