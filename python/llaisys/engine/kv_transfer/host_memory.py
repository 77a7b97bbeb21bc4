"""Host slots of an engine as bytes: a memfd per rank, mapped here, in which the slots lie one after
the other. See `llaisysModelKvReserveHost`."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llaisys.common.closing import closed_on_error
from llaisys.common.types import ModelInfo
from llaisys.common.version import __version__
from llaisys.engine.config import EngineConfig
from llaisys.engine.kv_transfer.connection import TransferError


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What must be equal for blocks to be exchanged."""

    slot_bytes: tuple[int, ...]  # of each rank
    block_size: int
    model: str  # hash of the version, the model and the options that change keys and values

    @classmethod
    def of(cls, config: EngineConfig, info: ModelInfo, memory: HostMemory) -> KvLayout:
        parts = (
            *(__version__, config.model, config.revision, config.dtype, config.quantization),
            *(config.exact,),
            *(config.cache.kv_cache_dtype, config.parallel.tensor_parallel_size),
            *(info.model_type, info.vocab_size, info.device),
        )
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
        return cls(memory.slot_bytes, info.block_size, digest)

    def text(self) -> str:
        """The form that is compared."""
        return f"{self.model}/{self.block_size}/{'+'.join(map(str, self.slot_bytes))}"


class HostMemory:
    """Mapped memory of all ranks. Owns copies of the descriptors of writable memory."""

    def __init__(self, descriptors: Sequence[int], num_slots: int, writable: bool) -> None:
        """Maps the files; TransferError when their sizes are not those of `num_slots` slots."""
        self.num_slots = num_slots
        self.descriptors: list[int] = []
        self._maps: list[mmap.mmap] = []
        self._slots: list[np.ndarray] = []  # of each rank: [num_slots, slot bytes]
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        with closed_on_error(self):
            for descriptor in descriptors:
                size = os.fstat(descriptor).st_size
                if num_slots < 1 or size < num_slots or size % num_slots:
                    raise TransferError(f"{size} bytes of host memory for {num_slots} slots")
                if writable:
                    self.descriptors.append(os.dup(descriptor))
                self._maps.append(mmap.mmap(descriptor, size, access=access))
                flat = np.frombuffer(self._maps[-1], np.uint8)
                self._slots.append(flat.reshape(num_slots, -1))

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        return tuple(slots.shape[1] for slots in self._slots)

    def views(self, slot: int) -> list[memoryview]:
        """Return the bytes of a slot, of each rank."""
        return [memoryview(slots[slot]) for slots in self._slots]

    def copy_from(self, other: HostMemory, source: int, slot: int) -> None:
        """Copy a slot of another engine; the GIL is released meanwhile."""
        for own, theirs in zip(self._slots, other._slots, strict=True):
            np.copyto(own[slot], theirs[source])

    def close(self) -> None:
        """Close the descriptors. Memory is unmapped when nothing uses it."""
        while self.descriptors:
            os.close(self.descriptors.pop())
        self._slots.clear()
        self._maps.clear()
