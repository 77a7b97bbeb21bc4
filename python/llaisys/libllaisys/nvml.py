"""NVIDIA's management library (NVML): finds GPUs and reads their utilization.

Wraps the few calls of nvml.h that are used. The library is optional: without it the utilization
metric is missing, and `gpu_probe` asks libcuda.
"""

from __future__ import annotations

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


class NvmlDevice:
    """One GPU; `device_id` is CUDA's index, which respects CUDA_VISIBLE_DEVICES."""

    def __init__(self, device_id: int, library: Any = None) -> None:
        self._library = load_library() if library is None else library
        self._device = ctypes.c_void_p()
        if self._library is not None and not self._find(device_id):
            self._library = None

    def _find(self, device_id: int) -> bool:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name.strip() for name in visible.split(",")] if visible else []
        name = names[device_id] if device_id < len(names) else str(device_id)
        handle = find_device(self._library, name)
        if handle is not None:
            self._device = handle
        return handle is not None

    def utilization(self) -> float | None:
        """Fraction of the last sample period in which a kernel ran, 0 to 1; None: unknown."""
        rates = _Utilization()
        if self._library is None:
            return None
        code = self._library.nvmlDeviceGetUtilizationRates(self._device, ctypes.byref(rates))
        return rates.gpu / 100 if code == 0 else None
