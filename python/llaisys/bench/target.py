"""Devices on which operators are timed: tensors on them, and the time of a call.

On a CPU a call is complete when it returns: its time is the wall time minus the overhead of a call
from Python. On a GPU the calls of a pass are captured as a graph, replayed, and timed by events.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from llaisys.common.closing import Closing
from llaisys.libllaisys.handles import Stream, Tensor, block_of
from llaisys.libllaisys.library import lib
from llaisys.libllaisys.types import QUANTISED_DTYPES
from llaisys.models.tensors import tensor_from, tensor_from_blocks

PASSES = 5
MIN_SECONDS = 0.05  # per pass
GPU_SECONDS = 0.01  # for the replays of a pass


class BenchTarget(Closing, ABC):
    """A stream of a device; `seconds` times calls on it."""

    device: str
    stream: Stream

    def close(self) -> None:
        self.stream.close()

    def activations(self, weights: str) -> str:
        """Dtype of activations for weights of this dtype."""
        return "f32"

    @abstractmethod
    def seconds(self, one_pass: Callable[[], Any], calls: int) -> float:
        """Seconds per call of a pass with `calls` calls: the best of PASSES."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return Tensor.create(shape, dtype, self.device)

    def tensor(self, values: np.ndarray[Any, Any], dtype: str) -> Tensor:
        """A tensor of values that have this dtype."""
        if self.device == "cpu":
            return tensor_from(values, dtype)
        dense = np.ascontiguousarray(values)
        made = self.empty(values.shape, dtype)
        made.load(dense.ctypes.data, dense.nbytes)
        return made

    def random(self, shape: tuple[int, ...], dtype: str = "f32", seed: int = 0) -> Tensor:
        """Random values; large tensors repeat them."""
        size = int(np.prod(shape))
        if dtype in QUANTISED_DTYPES:  # bytes of which every scale is finite and normal
            elements, nbytes = block_of(dtype)
            bytes_of_row = shape[1] // elements * nbytes
            some = np.random.default_rng(seed).integers(40, 60, 1 << 20, np.uint8)
            rows = np.resize(some, (shape[0], bytes_of_row))
            if dtype == "i8_channel":  # one scale per row
                rows.reshape(-1, nbytes)[:, :4] = some[:4]
            return tensor_from_blocks(rows, shape, dtype)
        some = np.random.default_rng(seed).standard_normal(min(size, 1 << 20), np.float32)
        if dtype == "bf16":
            bits = (some.view(np.uint32) >> 16).astype(np.uint16)
            return self.tensor(np.resize(bits, shape), "bf16")
        values = some.astype(np.float16 if dtype == "f16" else np.float32)
        return self.tensor(np.resize(values, shape), dtype)


class CpuTarget(BenchTarget):
    device = "cpu"

    def __init__(self, threads: int) -> None:
        self.stream = Stream(n_threads=threads)
        function, handle = lib().llaisysStreamSynchronize, self.stream.handle
        self._overhead = 0.0
        self._overhead = self.seconds(lambda: function(handle), 1)

    def seconds(self, one_pass: Callable[[], Any], calls: int) -> float:
        one_pass()
        start = time.perf_counter()
        one_pass()
        once = time.perf_counter() - start
        repeats = max(1, int(MIN_SECONDS / max(once, 1e-7)))
        best = float("inf")
        for _ in range(PASSES):
            start = time.perf_counter()
            for _ in range(repeats):
                one_pass()
            best = min(best, (time.perf_counter() - start) / repeats)
        return max(best / calls - self._overhead, 1e-9)


class GpuTarget(BenchTarget):
    def __init__(self, device: str) -> None:
        self.device = device
        self.stream = Stream(device)

    def activations(self, weights: str) -> str:
        return "bf16" if weights in QUANTISED_DTYPES else weights

    def seconds(self, one_pass: Callable[[], Any], calls: int) -> float:
        one_pass()  # warm-up: allocations and algorithm selection
        once = self.stream.replay_seconds(one_pass, 1)
        repeats = max(1, min(1000, int(GPU_SECONDS / max(once, 1e-7))))
        return min(self.stream.replay_seconds(one_pass, repeats) for _ in range(PASSES)) / calls


def open_target(device: str, threads: int) -> BenchTarget:
    return CpuTarget(threads) if device == "cpu" else GpuTarget(device)
