"""Which device a process computes on, and how much of its memory a model may have."""

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
    """To be called before anything native: picks the library that serves the device.

    Raises InvalidInputError when this installation or process cannot.
    """
    choose_library(device)


@cache
def warn_if_cublaslt_missing(device: str) -> None:
    """Says once what a GPU can do without, at a price."""
    if is_gpu(device) and any("without cuBLASLt" in line for line in describe_devices(device)):
        logger.warning(
            "cuBLASLt was not found: large products take kernels that are several times slower "
            "(pip install llaisys[cuda], or put the toolkit's libcublasLt on the library path)"
        )


def is_gpu(device: str) -> bool:
    return DEVICE_NAMES.get(device) == DEVICE_NVIDIA


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What one rank of a model takes of its device besides its KV cache, in bytes."""

    weights: int
    activations: int
    logits: int

    # The driver's context, cuBLASLt and captured graphs.
    OVERHEAD = 1 << 30

    def __add__(self, other: MemoryNeeds) -> MemoryNeeds:
        """Of two models that one process has."""
        return MemoryNeeds(
            self.weights + other.weights,
            self.activations + other.activations,
            self.logits + other.logits,
        )

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.logits + self.OVERHEAD


class GpuMonitor:
    """Looks at one GPU for whoever asks."""

    def __init__(self, device: str, device_id: int) -> None:
        self.device, self.device_id = device, device_id
        self._meter = NvmlDevice(device_id)

    def read(self) -> GpuUsage:
        free, total = device_memory(self.device, self.device_id)
        busy = self._meter.utilization()
        return GpuUsage(self.device_id, total - free, total, -1.0 if busy is None else busy)


def kv_budget(device: str, device_id: int, utilization: float, needs: MemoryNeeds) -> int:
    """Bytes that are left for the KV cache when the model may use `utilization` of the GPU."""
    free, total = device_memory(device, device_id)
    return int(total * utilization) - (total - free) - needs.total
