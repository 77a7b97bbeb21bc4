"""Finds and loads the native library, and turns its codes into exceptions."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from llaisys.common.errors import InvalidInputError, KvCacheFullError, LlaisysError, NativeError
from llaisys.libllaisys import types


def library_path() -> Path:
    """The file that `lib()` loads: `LLAISYS_LIBRARY`, or the one that came with the package."""
    override = os.environ.get("LLAISYS_LIBRARY")
    if override:
        return Path(override)
    return Path(__file__).resolve().parent.parent / "lib" / "libllaisys.so"


@cache
def lib() -> ctypes.CDLL:
    """The native library with all signatures declared; its ABI version must be ours exactly."""
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"cannot load the native library {path.name}: {error}") from error
    version = library.llaisysAbiVersion()
    if version != types.ABI_VERSION:
        raise NativeError(
            f"{path.name} has ABI version {version}, this package needs {types.ABI_VERSION}: "
            "install both together"
        )
    _declare_all(library)
    return library


def _declare_all(library: ctypes.CDLL) -> None:
    from llaisys.libllaisys import model, ops, runtime, tensor

    for module in (types, runtime, tensor, ops, model):
        for name, result, arguments in module.FUNCTIONS:
            function = getattr(library, name, None)
            if function is None:
                raise NativeError(f"{library._name} has no {name}: install both together")
            function.restype = result
            function.argtypes = arguments


def last_error() -> str:
    """Why the last failing call of this thread failed."""
    return str(lib().llaisysLastError().decode("utf-8", "replace"))


def error_from(code: int, text: str) -> LlaisysError:
    """The exception for a code of llaisysStatus_t, Step or Decode."""
    if code == types.DECODE_NO_KV_SLOT:
        return KvCacheFullError("the KV cache has no free slot for this step")
    if code == types.ERROR_INVALID:
        return InvalidInputError(text)
    return NativeError(text, code)


def check(code: int) -> None:
    """Raise unless the code is 0."""
    if code != types.OK:
        raise error_from(code, last_error())
