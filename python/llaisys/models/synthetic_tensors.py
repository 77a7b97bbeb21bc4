"""Random weights made in the memory of the device, in the dtype in which the model keeps them."""

from threading import Lock

import numpy as np

from llaisys.common.closing import Closing
from llaisys.libllaisys.handles import Stream, Tensor, block_of
from llaisys.libllaisys.library import check, lib
from llaisys.libllaisys.types import QUANTISED_DTYPES
from llaisys.models.loading.convert import Array, convert
from llaisys.models.loading.random_dir import random_values
from llaisys.models.tensors import tensor_from

ROWS = 256  # different rows of a matrix; others repeat them


class RandomTensors(Closing):
    """Matrices of one dtype and number of columns are slices of one tensor. Thread-safe."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._lock = Lock()
        self._sources: dict[tuple[str, int], Tensor] = {}

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        if len(shape) == 1:
            return tensor_from(convert(random_values(name, shape), "f32", dtype), dtype)
        with self._lock:
            key = (dtype, shape[1])
            source = self._sources.get(key)
            if source is None or source.shape[0] < shape[0]:
                if source is not None:
                    source.close()
                source = self._sources[key] = self._made(shape, dtype)
            return source.slice(0, 0, shape[0])

    def _made(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        few = _rows(shape[1], dtype)
        rows = np.resize(few, (shape[0], few.shape[1]))
        tensor = Tensor.create(shape, dtype, self._device)
        tensor.load(rows.ctypes.data, rows.nbytes)
        return tensor

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()


def _rows(columns: int, dtype: str) -> Array:
    """ROWS rows of a matrix as bytes."""
    values = random_values("", (ROWS, columns))
    if dtype not in QUANTISED_DTYPES:
        return np.ascontiguousarray(convert(values, "f32", dtype)).view(np.uint8)
    elements, nbytes = block_of(dtype)
    if dtype == "i4_g128":  # scale, zero point, values
        blocks = np.random.default_rng(1).integers(
            0, 256, (ROWS, columns // elements, nbytes), np.uint8
        )
        blocks[:, :, :4] = np.array([0.005], "<f4").view(np.uint8)
        blocks[:, :, 4:6] = np.array([7.5], "<f2").view(np.uint8)
        return blocks.reshape(ROWS, -1)
    made = np.empty((ROWS, columns // elements * nbytes), np.uint8)
    with (
        Stream(n_threads=1) as stream,
        tensor_from(values, "f32") as plain,
        Tensor.create(values.shape, dtype) as quantised,
    ):
        check(lib().llaisysQuantise(stream.handle, quantised.handle, plain.handle))
        quantised.store(made.ctypes.data, made.nbytes)
    return made
