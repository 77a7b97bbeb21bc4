"""Whether this process can use CUDA, and what is missing if it cannot."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llaisys.common.errors import LlaisysError
from llaisys.libllaisys import library, types
from llaisys.libllaisys.gpu_probe import find_gpus

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
