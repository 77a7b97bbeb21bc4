"""GPU utilization through NVIDIA's management library (NVML).

Wraps the few calls of nvml.h that are used. The library is optional: without it only the
utilization metric is missing.
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
        found = ctypes.byref(self._device)
        if name.isdecimal():
            code = self._library.nvmlDeviceGetHandleByIndex_v2(int(name), found)
        else:
            code = self._library.nvmlDeviceGetHandleByUUID(name.encode(), found)
        return bool(code == 0)

    def utilization(self) -> float | None:
        """Fraction of the last sample period in which a kernel ran, 0 to 1; None: unknown."""
        rates = _Utilization()
        if self._library is None:
            return None
        code = self._library.nvmlDeviceGetUtilizationRates(self._device, ctypes.byref(rates))
        return rates.gpu / 100 if code == 0 else None
