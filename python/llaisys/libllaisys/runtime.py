"""include/llaisys/runtime.h"""

from __future__ import annotations

from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p
from typing import Any

PROBES = {"read_bandwidth": 0, "f32": 1, "f16": 2, "i8": 3, "bf16": 4}

FUNCTIONS: list[tuple[str, Any, list[Any]]] = [
    ("llaisysDeviceCount", c_int32, [c_int]),
    ("llaisysDeviceMemory", c_int32, [c_int, c_int32, POINTER(c_int64), POINTER(c_int64)]),
    ("llaisysDeviceDescribe", c_int32, [c_int, c_int32, c_char_p, c_size_t]),
    ("llaisysCpuIsa", c_char_p, []),
    ("llaisysStreamCreate", c_int32, [c_int, c_int32, c_int32, POINTER(c_void_p)]),
    ("llaisysStreamDestroy", None, [c_void_p]),
    ("llaisysStreamSynchronize", c_int32, [c_void_p]),
    ("llaisysStreamMakeExact", c_int32, [c_void_p]),
    ("llaisysStreamThreads", c_int32, [c_void_p, POINTER(c_int32)]),
    ("llaisysBenchProbe", c_int32, [c_void_p, c_int, POINTER(c_double)]),
    ("llaisysBenchParallelRegion", c_int32, [c_void_p, c_int32, POINTER(c_double)]),
    ("llaisysBenchRecord", c_int32, [c_void_p]),
    ("llaisysBenchReplay", c_int32, [c_void_p, c_int32, POINTER(c_double)]),
]
