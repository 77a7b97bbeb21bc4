"""include/llaisys/runtime/kv_cache.h"""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_uint32
from enum import IntEnum


class KvStatus(IntEnum):
    OK = 0
    OOM_SLOT = 1
    INVALID_SEQ = 2
    INVALID_POS = 3
    EMPTY_RANGE = 4
    INTERNAL_ERROR = 5


LAYOUTS = {"slot": 0, "block": 1}


class LlaisysKvStats(Structure):
    _fields_ = (
        ("struct_size", c_uint32),
        ("layout", c_int32),
        ("capacity_slots", c_int64),
        ("used_slots", c_int64),
        ("peak_used_slots", c_int64),
        ("n_sequences", c_int64),
        ("bytes", c_int64),
        ("block_size", c_int32),
        ("reserved", c_int32),
    )
