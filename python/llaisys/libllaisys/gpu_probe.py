"""Search for NVIDIA GPUs through the driver's libraries, without the CUDA runtime.

NVML is asked first: it creates no CUDA state in the process. libcuda is asked where NVML is missing
or cannot identify a device (abbreviated UUIDs, partitioned GPUs). A machine without a driver costs
two failed calls of dlopen.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from llaisys.libllaisys import nvml

LIBCUDA = "libcuda.so.1"
# Attributes of cuDeviceGetAttribute.
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76

Capability = tuple[int, int]  # compute capability: major, minor


@dataclass(frozen=True, slots=True)
class GpuSearch:
    """The visible GPUs in CUDA's order; `problem` says why there are none."""

    capabilities: tuple[Capability, ...] = ()
    problem: str = ""


def find_gpus() -> GpuSearch:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process."""
    visible = nvml.visible_devices()
    if visible is not None and not visible:
        return GpuSearch((), "CUDA_VISIBLE_DEVICES hides all GPUs")
    found = _from_nvml(visible)
    if found is None:
        return _from_libcuda()
    return GpuSearch(found, "" if found else "the driver reports no GPU")


def _from_nvml(visible: list[str] | None) -> tuple[Capability, ...] | None:
    """The compute capabilities; None: NVML is missing or does not know a device."""
    library = nvml.load_library()
    if library is None:
        return None
    try:
        names = visible
        if names is None:
            count = ctypes.c_uint()
            if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
                return None
            names = [str(index) for index in range(count.value)]
        found = [_capability(library, name) for name in names]
        known = tuple(capability for capability in found if capability is not None)
        return known if len(known) == len(found) else None
    finally:
        library.nvmlShutdown()


def _capability(library: Any, name: str) -> Capability | None:
    handle = nvml.find_device(library, name)
    major, minor = ctypes.c_int(), ctypes.c_int()
    if handle is None:
        return None
    code = library.nvmlDeviceGetCudaComputeCapability(
        handle, ctypes.byref(major), ctypes.byref(minor)
    )
    return (major.value, minor.value) if code == 0 else None


def _from_libcuda() -> GpuSearch:
    try:
        library = ctypes.CDLL(LIBCUDA)
    except OSError:
        return GpuSearch((), "no NVIDIA driver was found")
    code = library.cuInit(0)
    if code != 0:
        return GpuSearch((), f"the NVIDIA driver found no usable GPU (cuInit failed with {code})")
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    found = []
    for device in range(count.value):
        values = []
        for attribute in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR):
            value = ctypes.c_int()
            library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            values.append(value.value)
        found.append((values[0], values[1]))
    return GpuSearch(tuple(found), "" if found else "the driver reports no GPU")
