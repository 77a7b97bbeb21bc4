"""Choice of a process's device, and its memory budget."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from llaisys.common.types import GpuUsage
from llaisys.common.validation import check_choice, invalid_value
from llaisys.libllaisys.cuda_support import find_cuda, load_cuda
from llaisys.libllaisys.handles import describe_devices, device_memory
from llaisys.libllaisys.library import choose_library, lib
from llaisys.libllaisys.nvml import NvmlDevice
from llaisys.libllaisys.types import DEVICE_NAMES, DEVICE_NVIDIA

logger = logging.getLogger("llaisys.models")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    device: str  # cpu or cuda
    reason: str
    num_gpus: int = 0  # visible to this process; 0 on the CPU


def requested_device(device: str) -> str:
    """`device`, or for `auto` the value of LLAISYS_DEVICE: auto, cpu or cuda."""
    if device != "auto":
        return device
    return check_choice(
        "LLAISYS_DEVICE", os.environ.get("LLAISYS_DEVICE") or "auto", ("auto", "cpu", "cuda")
    )


def choose_device(
    device_ids: Sequence[int] = (0,), num_ranks: int = 1, cpu_reason: str = ""
) -> DeviceChoice:
    """The device of `auto`: CUDA where it works, else the CPU. Loads the CUDA library in the first
    case. `cpu_reason`: an option that only the CPU supports."""
    if cpu_reason:
        return DeviceChoice("cpu", cpu_reason)
    support = find_cuda(device_ids, num_ranks)
    problem = support.problem or load_cuda()
    if problem is not None:
        return DeviceChoice("cpu", str(problem))
    reason = "GPU with compute capability {}.{}".format(*support.capability)
    return DeviceChoice("cuda", reason, support.num_gpus)


def require_cuda(device_ids: Sequence[int] = (0,), num_ranks: int = 1) -> DeviceChoice:
    """Load the CUDA library. Raises InvalidInputError, which says what is missing and how to get
    it."""
    support = find_cuda(device_ids, num_ranks)
    problem = support.problem or load_cuda()
    if problem is not None:
        raise invalid_value("device", "cuda", f"cpu here: {problem}")
    return DeviceChoice("cuda", "as requested", support.num_gpus)


def open_device(device: str) -> None:
    """Select the native library for a device. Call before any other native function.

    Raises InvalidInputError when this installation or process has no such library.
    """
    choose_library(device)


@cache
def warn_if_cublaslt_missing(device: str) -> None:
    """Warn once when a GPU runs without cuBLASLt."""
    if is_gpu(device) and any("without cuBLASLt" in line for line in describe_devices(device)):
        logger.warning(
            "cuBLASLt was not found: large products use kernels that are several times slower "
            "(pip install llaisys[cuda], or put the toolkit's libcublasLt on the library path)"
        )


def padded_rows(rows: int, has_drafts: bool = False) -> int:
    """Rows of the CUDA graph that runs a decode step of `rows` rows, or a step of so many tokens
    with drafts; 0: none."""
    return int(lib().llaisysGraphRows(rows, has_drafts))


def is_gpu(device: str) -> bool:
    return DEVICE_NAMES.get(device) == DEVICE_NVIDIA


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Device memory of one rank besides its KV cache, in bytes."""

    weights: int
    activations: int
    logits: int

    # CUDA context, cuBLASLt and captured graphs.
    OVERHEAD = 1 << 30

    def __add__(self, other: MemoryNeeds) -> MemoryNeeds:
        """Sum for two models of one process."""
        return MemoryNeeds(
            self.weights + other.weights,
            self.activations + other.activations,
            self.logits + other.logits,
        )

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.logits + self.OVERHEAD


class GpuMonitor:
    """Memory use and utilization of one GPU."""

    def __init__(self, device: str, device_id: int) -> None:
        self.device, self.device_id = device, device_id
        self._nvml = NvmlDevice(device_id)

    def read(self) -> GpuUsage:
        free, total = device_memory(self.device, self.device_id)
        used = self._nvml.utilization()
        return GpuUsage(self.device_id, total - free, total, -1.0 if used is None else used)


def kv_budget(device: str, device_id: int, utilization: float, needs: MemoryNeeds) -> int:
    """Bytes left for the KV cache when the process may use `utilization` of the GPU's memory."""
    free, total = device_memory(device, device_id)
    return int(total * utilization) - (total - free) - needs.total
