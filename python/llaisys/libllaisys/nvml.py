"""NVIDIA's management library (NVML): finds GPUs and reads their utilization.

Wraps the few calls of nvml.h that are used. The library is optional: without it the utilization
metric is missing, and `cuda_support` asks libcuda.
"""

import ctypes
import os
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def load_library() -> Any:
    """The initialised library; None without library or driver."""
    try:
        library = ctypes.CDLL(LIBRARY)
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def find_device(library: Any, name: str) -> ctypes.c_void_p | None:
    """The handle of a GPU by its index or UUID, as CUDA_VISIBLE_DEVICES names it."""
    handle = ctypes.c_void_p()
    if name.isdecimal():
        code = library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
    else:
        code = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    return handle if code == 0 else None


def visible_devices() -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES before the first negative one, which ends the list; None:
    the variable is not set."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return names


class NvmlDevice:
    """One GPU; `device_id` is CUDA's index, which respects CUDA_VISIBLE_DEVICES."""

    def __init__(self, device_id: int, library: Any = None) -> None:
        self._library = load_library() if library is None else library
        names = visible_devices() or []
        name = names[device_id] if device_id < len(names) else str(device_id)
        self._device = None if self._library is None else find_device(self._library, name)

    def utilization(self) -> float | None:
        """Fraction of the last sample period in which a kernel ran, 0 to 1; None: unknown."""
        rates = _Utilization()
        if self._device is None:
            return None
        code = self._library.nvmlDeviceGetUtilizationRates(self._device, ctypes.byref(rates))
        return rates.gpu / 100 if code == 0 else None
