"""Owners of native objects. Each is freed by `close()` (or a `with` block), never by `__del__`.

Addresses are plain integers: the caller keeps the memory alive during the call.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llaisys.common.closing import Closing
from llaisys.common.errors import ClosedError, InvalidInputError
from llaisys.libllaisys import types
from llaisys.libllaisys.library import check, lib
from llaisys.libllaisys.types import PROBES


def _sizes(values: Sequence[int]) -> Any:
    try:
        return (ctypes.c_int64 * len(values))(*values)
    except (TypeError, ctypes.ArgumentError) as error:
        raise InvalidInputError(
            f"shape is {list(values)!r}; it must be integers",
            field="shape", value=list(values), limit="integers",
        ) from error  # fmt: skip


def _unknown(field: str, value: str, known: Iterable[str]) -> InvalidInputError:
    limit = f"one of {', '.join(known)}"
    message = f"{field} is {value!r}; it must be {limit}"
    return InvalidInputError(message, field=field, value=value, limit=limit)


def dtype_code(name: str) -> int:
    """The C value of a dtype name."""
    try:
        return types.DTYPES[name]
    except KeyError:
        raise _unknown("dtype", name, types.DTYPES) from None


def device_code(name: str) -> int:
    """The C value of a device name."""
    code = types.DEVICE_NAMES.get(name)
    if code is None:
        raise _unknown("device", name, types.DEVICE_NAMES)
    return code


def output_of(kind: Any, function: str, *arguments: Any) -> Any:
    """Call a C function whose last argument is a pointer to its result; return the result."""
    result = kind()
    check(getattr(lib(), function)(*arguments, ctypes.byref(result)))
    return result.value


def device_memory(device: str, device_id: int = 0) -> tuple[int, int]:
    """(free bytes, total bytes) of a device."""
    free = ctypes.c_int64()
    arguments = (device_code(device), device_id, ctypes.byref(free))
    total = output_of(ctypes.c_int64, "llaisysDeviceMemory", *arguments)
    return free.value, total


def block_of(dtype: str) -> tuple[int, int]:
    """(elements, bytes) per block of a dtype."""
    traits = types.LlaisysDataTypeTraits()
    check(lib().llaisysDataTypeGetTraits(dtype_code(dtype), ctypes.byref(traits)))
    return traits.block_elements, traits.block_bytes


def linear_weight_bytes(
    dtype: str, out_features: int, in_features: int, device: str = "cpu"
) -> int:
    """Bytes of a weight in the packed layout of the device's kernels."""
    arguments = (device_code(device), dtype_code(dtype), out_features, in_features)
    return int(output_of(ctypes.c_int64, "llaisysLinearWeightBytes", *arguments))


def describe_devices(device: str) -> list[str]:
    """One line of text per device of this kind."""
    lines = []
    for device_id in range(lib().llaisysDeviceCount(device_code(device))):
        text = ctypes.create_string_buffer(256)
        check(lib().llaisysDeviceDescribe(device_code(device), device_id, text, len(text)))
        lines.append(text.value.decode("utf-8", "replace"))
    return lines


def handle_array(*handles: Handle) -> Any:
    """A C array of handles; it does not keep the objects alive."""
    return (ctypes.c_void_p * len(handles))(*(handle.handle for handle in handles))


class Handle(Closing):
    """Owner of a native object. `handle` raises ClosedError after `close` or
    `release_ownership`."""

    _destroy = ""  # name of the C function that frees it

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise ClosedError(f"{type(self).__name__} was used after close()")
        return self._handle

    def release_ownership(self) -> None:
        """Give up ownership: another object frees the native object."""
        self._handle = None

    def regain_ownership(self, handle: int) -> None:
        """Own the native object again after a failed transfer."""
        self._handle = handle

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            check(getattr(lib(), self._destroy)(handle) or types.OK)


class Stream(Handle):
    """An ordered queue of work on one device; on a CPU, a thread pool."""

    _destroy = "llaisysStreamDestroy"

    def synchronize(self) -> None:
        check(lib().llaisysStreamSynchronize(self.handle))

    def make_exact(self) -> None:
        """Make results batch-invariant: independent of the number of rows in a call."""
        check(lib().llaisysStreamMakeExact(self.handle))

    def __init__(self, device: str = "cpu", device_id: int = 0, n_threads: int = 0) -> None:
        arguments = (device_code(device), device_id, n_threads)
        super().__init__(output_of(ctypes.c_void_p, "llaisysStreamCreate", *arguments))

    @property
    def n_threads(self) -> int:
        return int(output_of(ctypes.c_int32, "llaisysStreamThreads", self.handle))

    def probe(self, name: str) -> float:
        """A measured hardware limit: bytes/s or operations/s; 0 when not supported."""
        return float(output_of(ctypes.c_double, "llaisysBenchProbe", self.handle, PROBES[name]))

    def replay_seconds(self, calls: Callable[[], Any], repeats: int) -> float:
        """Seconds per replay of the work that `calls` launches, captured as a graph and replayed
        `repeats` times. `calls` must have run once before."""
        check(lib().llaisysBenchRecord(self.handle))
        value = ctypes.c_double()
        try:
            calls()
        finally:
            status = lib().llaisysBenchReplay(self.handle, repeats, ctypes.byref(value))
        check(status)
        return value.value

    def parallel_region_seconds(self, count: int) -> float:
        """Seconds for `count` empty parallel regions."""
        arguments = (self.handle, count)
        return float(output_of(ctypes.c_double, "llaisysBenchParallelRegion", *arguments))


class Tensor(Handle):
    """A native tensor."""

    _destroy = "llaisysTensorDestroy"

    @classmethod
    def create(cls, shape: Sequence[int], dtype: str, device: str = "cpu") -> Tensor:
        """A zeroed tensor on the first device of this kind."""
        arguments = (_sizes(shape), len(shape), dtype_code(dtype), device_code(device), 0)
        return cls(output_of(ctypes.c_void_p, "llaisysTensorCreate", *arguments))

    @classmethod
    def map(cls, path: str, offset: int, shape: Sequence[int], dtype: str) -> Tensor:
        """A tensor over the mapped bytes of a file from `offset` on."""
        arguments = (str(path).encode(), offset, _sizes(shape), len(shape), dtype_code(dtype))
        return cls(output_of(ctypes.c_void_p, "llaisysTensorMap", *arguments))

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = (ctypes.c_int64 * lib().llaisysTensorNdim(self.handle))()
        check(lib().llaisysTensorShape(self.handle, sizes))
        return tuple(sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        sizes = (ctypes.c_int64 * lib().llaisysTensorNdim(self.handle))()
        check(lib().llaisysTensorStrides(self.handle, sizes))
        return tuple(sizes)

    @property
    def dtype(self) -> str:
        return types.DTYPE_NAMES[lib().llaisysTensorDataType(self.handle)]

    @property
    def data(self) -> int:
        """Address of the first element; 0 for an empty tensor."""
        return int(lib().llaisysTensorData(self.handle) or 0)

    @property
    def memory(self) -> memoryview:
        """Writable bytes of a contiguous CPU tensor; invalid after close()."""
        size = math.prod(self.shape) * types.DTYPE_BYTES[self.dtype]
        return memoryview((ctypes.c_ubyte * size).from_address(self.data)).cast("B")

    @property
    def is_contiguous(self) -> bool:
        return bool(lib().llaisysTensorIsContiguous(self.handle) == 1)

    @property
    def is_mapped(self) -> bool:
        return bool(lib().llaisysTensorIsMapped(self.handle) == 1)

    def load(self, address: int, n_bytes: int) -> None:
        check(lib().llaisysTensorLoad(self.handle, address, n_bytes))

    def store(self, address: int, n_bytes: int) -> None:
        check(lib().llaisysTensorStore(self.handle, address, n_bytes))

    def _derived(self, function: str, *arguments: Any) -> Tensor:
        return Tensor(output_of(ctypes.c_void_p, function, self.handle, *arguments))

    def view(self, shape: Sequence[int]) -> Tensor:
        return self._derived("llaisysTensorView", _sizes(shape), len(shape))

    def slice(self, dim: int, start: int, end: int) -> Tensor:
        return self._derived("llaisysTensorSlice", dim, start, end)

    def permute(self, order: Sequence[int]) -> Tensor:
        if len(order) != len(self.shape):
            raise InvalidInputError(
                f"order has {len(order)} entries; it must have {len(self.shape)}",
                field="order", value=len(order), limit=str(len(self.shape)),
            )  # fmt: skip
        return self._derived("llaisysTensorPermute", (ctypes.c_int32 * len(order))(*order))

    def contiguous(self) -> Tensor:
        return self._derived("llaisysTensorContiguous")


class LinearWeight(Handle):
    """A weight in the packed layout of `llaisysLinear`."""

    _destroy = "llaisysLinearWeightDestroy"

    def __init__(self, tensor: Tensor, stream: Stream | None = None) -> None:
        on = stream.handle if stream is not None else None
        arguments = (on, tensor.handle)
        super().__init__(output_of(ctypes.c_void_p, "llaisysLinearWeightCreate", *arguments))
