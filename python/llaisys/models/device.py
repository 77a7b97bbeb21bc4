"""Selection of a process's device, and its memory budget."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

from llaisys.common.types import GpuUsage
from llaisys.libllaisys.handles import describe_devices, device_memory
from llaisys.libllaisys.library import choose_library
from llaisys.libllaisys.nvml import NvmlDevice
from llaisys.libllaisys.types import DEVICE_NAMES, DEVICE_NVIDIA

logger = logging.getLogger("llaisys.models")


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
