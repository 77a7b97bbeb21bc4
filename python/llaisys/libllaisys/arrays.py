"""Copies between native memory and Python buffers, and pointers between ctypes structs."""

import ctypes
from collections.abc import Sequence
from typing import Any

_KINDS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}


def int32_copy(address: int | None, n: int) -> bytes:
    """The bytes of int32 [n]; empty when n is 0."""
    return ctypes.string_at(address, 4 * n) if n > 0 and address else b""


def float_copy(address: int | None, n: int) -> bytearray:
    """The bytes of float [n], writable."""
    if n <= 0 or not address:
        return bytearray()
    return bytearray((ctypes.c_char * (4 * n)).from_address(address))


def copy(address: int, n_bytes: int) -> bytes:
    """Bytes at an address."""
    return ctypes.string_at(address, n_bytes)


def attach(owner: Any, field: str, value: Any) -> None:
    """Point a `c_void_p` field at a ctypes object, which `owner` keeps alive."""
    setattr(owner, field, ctypes.addressof(value))
    setattr(owner, f"_{field}_ref", value)


def attach_structs(owner: Any, field: str, kind: type[ctypes.Structure], n: int) -> Any:
    """`attach` a new array of n structs and return it."""
    structs = (kind * n)()
    attach(owner, field, structs)
    return structs


def attach_array(owner: Any, field: str, dtype: str, values: Sequence[float]) -> None:
    """`attach` a new array of this dtype."""
    attach(owner, field, (_KINDS[dtype] * max(1, len(values)))(*values))


def address_of(values: memoryview) -> int:
    """Address of a writable, non-empty buffer; three times as fast as numpy's ctypes.data."""
    return ctypes.addressof(ctypes.c_char.from_buffer(values))
