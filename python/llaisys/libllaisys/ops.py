"""include/llaisys/ops.h"""

from __future__ import annotations

from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from typing import Any

_HANDLES = POINTER(c_void_p)


def _tensors(count: int, *rest: Any) -> list[Any]:
    """A stream, `count` tensors, then the rest."""
    return [c_void_p] * (count + 1) + list(rest)


FUNCTIONS: list[tuple[str, Any, list[Any]]] = [
    ("llaisysAdd", c_int32, _tensors(3)),
    ("llaisysArgmax", c_int32, _tensors(3)),
    ("llaisysEmbedding", c_int32, _tensors(3)),
    ("llaisysLinearWeightCreate", c_int32, _tensors(1, _HANDLES)),
    ("llaisysLinearWeightDestroy", None, [c_void_p]),
    ("llaisysLinearWeightBytes", c_int32, [c_int, c_int, c_int64, c_int64, POINTER(c_int64)]),
    ("llaisysLinear", c_int32, _tensors(2, c_int32, _HANDLES, _HANDLES, _HANDLES)),
    (
        "llaisysMoeRoute",
        c_int32,
        _tensors(4, c_int32, c_int32, c_int32, c_int32, c_float),
    ),
    ("llaisysMoeMlp", c_int32, _tensors(10, c_int32, c_float, c_float)),
    ("llaisysRmsNorm", c_int32, _tensors(3, c_float)),
    ("llaisysAddRmsNorm", c_int32, _tensors(4, c_float)),
    ("llaisysRope", c_int32, _tensors(4)),
    ("llaisysKvStore", c_int32, _tensors(3)),
    ("llaisysAttention", c_int32, _tensors(10, c_int64, c_int32, c_float, c_float)),
    ("llaisysSelfAttentionMasked", c_int32, _tensors(5, c_float)),
    ("llaisysQuantise", c_int32, _tensors(2)),
    ("llaisysRearrange", c_int32, _tensors(2)),
    ("llaisysSwiGLU", c_int32, _tensors(3)),
    ("llaisysTopK", c_int32, _tensors(3)),
]
