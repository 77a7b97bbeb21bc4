"""Whether this process can use CUDA, and what is missing if it cannot."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llaisys.common.errors import LlaisysError
from llaisys.libllaisys import library, nvml, types

MIN_CAPABILITY = (8, 0)  # that the kernels support
NCCL = "libnccl.so.2"
DRIVER_DIRECTORY = Path("/proc/driver/nvidia")  # of the kernel module

BUILD = "install the wheel with CUDA, or `make build CUDA=1` where nvcc is installed"
DRIVER = "install the NVIDIA driver, and check it with nvidia-smi"
EXTRA = "`pip install 'llaisys[cuda]'` installs it"


@dataclass(frozen=True, slots=True)
class CudaProblem:
    """What CUDA lacks and how to get it; a part of a sentence each. `remedy` may be empty."""

    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.remedy})" if self.remedy else self.what


@dataclass(frozen=True, slots=True)
class CudaSupport:
    """The result of a search: either a problem, or the number of visible GPUs and their lowest
    compute capability."""

    problem: CudaProblem | None = None
    num_gpus: int = 0
    capability: tuple[int, int] = (0, 0)


def find_cuda(device_ids: Sequence[int] = (0,), num_ranks: int = 1) -> CudaSupport:
    """Search for what CUDA on these devices needs, without loading the CUDA library: the library's
    file, the driver, the GPUs and, for several ranks on different GPUs, NCCL."""
    if library.is_loaded() and not library.is_cuda_chosen():
        return _lacks("this process has already loaded the native library without CUDA")
    if not library.library_path(library.CUDA_LIBRARY).is_file():
        gpu = ", though there is an NVIDIA driver" if DRIVER_DIRECTORY.is_dir() else ""
        return _lacks(f"this installation has no {library.CUDA_LIBRARY}{gpu}", BUILD)
    gpus = find_gpus()
    if gpus.problem:
        return _lacks(gpus.problem, DRIVER if "driver" in gpus.problem else "")
    count = len(gpus.capabilities)
    if max(device_ids) >= count:
        return _lacks(f"there is no GPU {max(device_ids)}; visible GPUs: {count}")
    lowest = min(gpus.capabilities[index] for index in device_ids)
    if lowest < MIN_CAPABILITY:
        needed = "at least {}.{} is needed".format(*MIN_CAPABILITY)
        return _lacks("the GPU has compute capability {}.{}; {}".format(*lowest, needed))
    if num_ranks > 1 and len(set(device_ids)) == len(device_ids) and not _has_nccl():
        return _lacks(f"{NCCL}, which tensor parallelism needs, was not found", EXTRA)
    return CudaSupport(num_gpus=count, capability=lowest)


def load_cuda() -> CudaProblem | None:
    """Load the CUDA library. After a problem the process can still use the CPU."""
    try:
        library.choose_library("cuda")
        count = library.lib().llaisysDeviceCount(types.DEVICE_NVIDIA)
    except LlaisysError as error:
        library.choose_cpu_library()
        return CudaProblem(str(error), BUILD)
    if count == 0:
        return CudaProblem(
            f"{library.library_path().name} finds no GPU that it can use",
            "a newer NVIDIA driver may be needed",
        )
    return None


def _lacks(what: str, remedy: str = "") -> CudaSupport:
    return CudaSupport(CudaProblem(what, remedy))


def _has_nccl() -> bool:
    library.preload("libnccl.so")
    try:
        ctypes.CDLL(NCCL)
    except OSError:
        return False
    return True


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
