"""Finds and loads the native library, and converts its status codes to exceptions."""

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

from llaisys.common.errors import InvalidInputError, KvCacheFullError, LlaisysError, NativeError
from llaisys.libllaisys import types
from llaisys.libllaisys.headers import functions

CPU_LIBRARY = "libllaisys.so"
CUDA_LIBRARY = "libllaisys_cuda.so"  # with CUDA; supports the CPU as well

_chosen = CPU_LIBRARY  # loaded by lib()


def library_path(name: str = "") -> Path:
    """The file that `lib()` loads: `LLAISYS_LIBRARY`, the one in the package, or in an editable
    package (`make develop`) the one in `build/native` of the repository. `name`: the file of one of
    the two libraries."""
    override = os.environ.get("LLAISYS_LIBRARY")
    if override:
        return Path(override)
    package = Path(__file__).resolve().parent.parent
    built = package.parents[1] / "build/native" / (name or _chosen)
    installed = package / "lib" / (name or _chosen)
    return built if built.is_file() and not installed.is_file() else installed


def is_loaded() -> bool:
    """Whether this process has loaded a library, which is final."""
    return bool(lib.cache_info().currsize)


def is_cuda_chosen() -> bool:
    return _chosen == CUDA_LIBRARY


def choose_cpu_library() -> None:
    """Make `lib()` load the CPU library, unless a library is loaded."""
    global _chosen
    if not is_loaded():
        _chosen = CPU_LIBRARY


def choose_library(device: str) -> None:
    """Make `lib()` load the library for a device. A process loads one library: after the CPU
    library is loaded, a GPU is rejected."""
    global _chosen
    if types.DEVICE_NAMES.get(device) != types.DEVICE_NVIDIA or _chosen == CUDA_LIBRARY:
        return
    if is_loaded():
        if lib().llaisysDeviceCount(types.DEVICE_NVIDIA) == 0:
            why = "the CPU library is already loaded in this process, or there is no usable GPU"
            raise _only_the_cpu(device, why)
        return
    _chosen = CUDA_LIBRARY
    if not library_path().is_file():
        _chosen = CPU_LIBRARY
        why = f"this installation has no {CUDA_LIBRARY} (`make build CUDA=1` builds it)"
        raise _only_the_cpu(device, why)
    preload("libcublasLt.so")
    preload("libnccl.so")


def _only_the_cpu(device: str, why: str) -> InvalidInputError:
    limit = f"cpu: {why}"
    return InvalidInputError(
        f"device is {device!r}; it must be {limit}", field="device", value=device, limit=limit
    )


def preload(name: str) -> None:
    """Load a library from an `nvidia-*` wheel (`pip install llaisys[cuda]`), the latest version of
    several. dlopen() in the core finds it by its SONAME then."""
    for folder in map(Path, sys.path):
        found = folder.glob(f"nvidia/*/lib/{name}.*")
        for path in sorted(found, key=lambda path: path.name, reverse=True):
            try:
                ctypes.CDLL(str(path))
            except OSError:
                continue
            return


@cache
def lib() -> ctypes.CDLL:
    """The native library with all signatures declared; its ABI version must match exactly."""
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
    for name, result, arguments in functions():
        function = getattr(library, name, None)
        if function is None:
            raise NativeError(f"{path.name} has no {name}: install both together")
        function.restype = result
        function.argtypes = arguments
    return library


def last_error() -> str:
    """Error text of the last failed call of this thread."""
    return str(lib().llaisysLastError().decode("utf-8", "replace"))


def error_from(code: int, text: str) -> LlaisysError:
    """The exception for a status code of any call."""
    if code == types.DECODE_NO_KV_SLOT:
        return KvCacheFullError("the KV cache has no free slot for this step")
    if code == types.ERROR_INVALID:
        return InvalidInputError(text)
    return NativeError(text, code)


def check(code: int) -> None:
    """Raise unless the code is 0."""
    if code != types.OK:
        raise error_from(code, last_error())
