"""Fills the arrays of a step from the rows of the engine's sequences (LlaisysStepBuffers)."""

from typing import Any

from numpy.typing import NDArray

from llaisys.libllaisys.library import check, lib
from llaisys.libllaisys.types import LlaisysStepBuffers


class StepFiller:
    """Reads and writes numpy arrays through their addresses, and keeps them alive."""

    def __init__(self, block_size: int, **arrays: NDArray[Any]) -> None:
        """`arrays`: the array fields of LlaisysStepBuffers, by name."""
        self._arrays = arrays
        self._buffers = buffers = LlaisysStepBuffers()
        buffers.n_rows, buffers.max_tokens = arrays["row_tokens"].shape
        buffers.max_blocks = arrays["row_blocks"].shape[1]
        buffers.block_size = block_size
        buffers.max_step_tokens = len(arrays["token_ids"])
        for name, array in arrays.items():
            setattr(buffers, name, array.ctypes.data)

    def fill_tokens(self, num_seqs: int) -> None:
        check(lib().llaisysFillStepTokens(self._buffers, num_seqs))

    def fill_slots(self, num_seqs: int) -> None:
        check(lib().llaisysFillStepSlots(self._buffers, num_seqs))
