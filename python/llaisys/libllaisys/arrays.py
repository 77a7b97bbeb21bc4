"""Copies between native memory and Python buffers, and structs that point into each other."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any


def int32_copy(address: int | None, n: int) -> bytes:
    """The bytes of int32 [n]; empty when n is 0."""
    return ctypes.string_at(address, 4 * n) if n > 0 and address else b""


def float_copy(address: int | None, n: int) -> bytearray:
    """The bytes of float [n], writable."""
    return (
        bytearray((ctypes.c_char * (4 * n)).from_address(address))
        if n > 0 and address
        else (bytearray())
    )


def int32_list(address: int, n: int) -> list[int]:
    """int32 [n]; quicker than an array where n is small and there are many."""
    return array("i", ctypes.string_at(address, 4 * n)).tolist()


def float_list(address: int, n: int) -> list[float]:
    """The same of float."""
    return array("f", ctypes.string_at(address, 4 * n)).tolist()


def attach_struct(owner: Any, field: str, value: ctypes.Structure) -> None:
    """Point a `c_void_p` field of a struct at another struct and keep that alive with it."""
    setattr(owner, field, ctypes.addressof(value))
    setattr(owner, f"_{field}_ref", value)


def attach_structs(owner: Any, field: str, kind: type[ctypes.Structure], n: int) -> Any:
    """Point a `c_void_p` field at a new array of n structs, kept alive with it; the array."""
    structs = (kind * n)()
    _keep(owner, field, structs)
    return structs


def attach_int32(owner: Any, field: str, values: Sequence[int]) -> None:
    """Point a `c_void_p` field at a new int32 array with these values, kept alive with it."""
    _keep(owner, field, (ctypes.c_int32 * max(1, len(values)))(*values))


def attach_int64(owner: Any, field: str, values: Sequence[int]) -> None:
    """The same with int64."""
    _keep(owner, field, (ctypes.c_int64 * max(1, len(values)))(*values))


def attach_float(owner: Any, field: str, values: Sequence[float]) -> None:
    """The same with float."""
    _keep(owner, field, (ctypes.c_float * max(1, len(values)))(*values))


def _keep(owner: Any, field: str, values: Any) -> None:
    setattr(owner, field, ctypes.addressof(values))
    setattr(owner, f"_{field}_ref", values)


def address_of(values: memoryview) -> int:
    """Of numbers that can be written and are not none; a third of the time of numpy's own."""
    return ctypes.addressof(ctypes.c_char.from_buffer(values))
