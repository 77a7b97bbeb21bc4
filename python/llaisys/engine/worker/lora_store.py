"""The LoRA adapters of one rank: files, weights in host memory, device slots.

Files are opened and read in a thread of their own, so that steps go on meanwhile. What is in host
memory and in which slot is decided by the engine core.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from llaisys.common.closing import closed_on_error
from llaisys.common.errors import LlaisysError, ModelLoadError
from llaisys.common.lora import LoraLoad, LoraState
from llaisys.common.parallel import ParallelConfig
from llaisys.common.progress import report
from llaisys.engine.config import LoraConfig
from llaisys.models.base import AdapterOptions, ModelAdapter
from llaisys.models.device import MemoryNeeds
from llaisys.models.families.model_config import ModelConfig, decoder_config
from llaisys.models.lora import LoraFiles, LoraWeights, open_lora, read_lora

logger = logging.getLogger("llaisys.engine")

MAX_LORA_RANK = 256  # as LoraConfig
LORA_METHODS = ("open", "read", "evict", "drop", "state", "error")  # of LoraStore, for the engine


@dataclass(slots=True)
class _Adapter:
    """`files` and `weights` are set by the reading thread; `lock` guards `weights` and
    `is_dropped`."""

    path: str
    files: LoraFiles | None = None
    weights: LoraWeights | None = None
    error: str = ""
    task: Future[None] | None = None  # opens or reads it
    is_dropped: bool = False
    lock: Lock = field(default_factory=Lock)


class LoraStore:
    """Not thread-safe; calls that read return at once."""

    def __init__(self, base: ModelConfig, parallel: ParallelConfig, max_rank: int) -> None:
        """`base`: of the base model; `parallel`: with this rank."""
        self._base = base
        self._parallel = parallel
        self._max_rank = max_rank
        self._adapters: dict[int, _Adapter] = {}
        self._filled: dict[int, int] = {}  # slot -> adapter
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="llaisys-lora")

    def __len__(self) -> int:
        """Adapters that were added and not removed."""
        return len(self._adapters)

    # ---- files ---------------------------------------------------------------------------------

    def add(self, lora_id: int, files: LoraFiles, read: bool) -> None:
        """Add an open adapter and, with `read`, read it now. Raises ModelLoadError."""
        adapter = self._adapters[lora_id] = _Adapter(files.where, files)
        if read:
            adapter.weights = read_lora(files, self._base, self._parallel)

    def open(self, lora_id: int, path: str, read: bool) -> None:
        """Start to open an adapter and, with `read`, to read it; see `state`."""
        adapter = self._adapters[lora_id] = _Adapter(path)
        adapter.task = self._pool.submit(self._open, adapter, read)

    def read(self, lora_id: int) -> None:
        """Start to read an adapter that is open and not in memory."""
        adapter = self._adapters[lora_id]
        adapter.error = ""
        adapter.task = self._pool.submit(self._read, adapter)

    def evict(self, lora_id: int) -> None:
        """Free the host memory of an adapter; it stays open."""
        adapter = self._adapters[lora_id]
        with adapter.lock:
            weights, adapter.weights = adapter.weights, None
        if weights is not None:
            weights.close()

    def drop(self, lora_id: int) -> None:
        """Remove an adapter; unknown ids are ignored. A read that runs ends early."""
        adapter = self._adapters.pop(lora_id, None)
        if adapter is None:
            return
        with adapter.lock:
            adapter.is_dropped = True
            weights, adapter.weights = adapter.weights, None
        if weights is not None:
            weights.close()

    def state(self, lora_id: int) -> LoraState:
        adapter = self._adapters[lora_id]
        if adapter.task is not None and not adapter.task.done():
            return LoraState.READING
        if adapter.error:
            return LoraState.FAILED
        return LoraState.ON_DISK if adapter.weights is None else LoraState.READY

    def error(self, lora_id: int) -> str:
        """Why an adapter has failed; "": it has not on this rank."""
        return self._adapters[lora_id].error

    def close(self) -> None:
        for lora_id in tuple(self._adapters):
            self.drop(lora_id)
        self._pool.shutdown(wait=True)

    # ---- slots ---------------------------------------------------------------------------------

    def fill_slot(self, adapter: ModelAdapter, load: LoraLoad) -> None:
        """Fill a device slot from host memory; waits for a read that another rank has finished."""
        slot, lora_id = load
        if self._filled.get(slot) == lora_id:
            return
        found = self._adapters.get(lora_id)
        if found is not None and found.task is not None:
            found.task.result()
        if found is None or found.weights is None:
            raise RuntimeError(f"LoRA adapter {lora_id} is not in host memory: slot {slot}")
        self._filled.pop(slot, None)
        adapter.load_lora(slot, found.weights)
        self._filled[slot] = lora_id

    # ---- in the reading thread -----------------------------------------------------------------

    def _open(self, adapter: _Adapter, read: bool) -> None:
        try:
            adapter.files = open_checked(adapter.path, self._base, self._max_rank)
        except Exception as error:
            self._fail(adapter, error)
            return
        if read:
            self._read(adapter)

    def _read(self, adapter: _Adapter) -> None:
        def check() -> None:
            if adapter.is_dropped:
                raise ModelLoadError("the adapter was unloaded while it was read")

        try:
            assert adapter.files is not None
            weights = read_lora(adapter.files, self._base, self._parallel, check)
        except Exception as error:
            self._fail(adapter, error)
            return
        with adapter.lock:
            if not adapter.is_dropped:
                adapter.weights = weights
                return
        weights.close()

    def _fail(self, adapter: _Adapter, error: Exception) -> None:
        if not isinstance(error, LlaisysError | MemoryError):
            logger.error("the adapter %s cannot be read", adapter.path, exc_info=error)
        adapter.error = str(error) or type(error).__name__


def open_checked(path: str, base: ModelConfig, max_rank: int) -> LoraFiles:
    """Open an adapter of at most `max_rank`. Raises ModelLoadError."""
    files = open_lora(path, base)
    if files.rank > max_rank:
        raise ModelLoadError(
            f"{files.where}: the adapter has rank {files.rank}; max_lora_rank is {max_rank}"
        )
    return files


@dataclass(frozen=True, slots=True)
class OpenedLoras:
    """The adapters of `lora_modules` with open headers, and the device slots."""

    files: tuple[LoraFiles, ...]
    num_slots: int
    max_rank: int
    memory_needs: MemoryNeeds  # of the slots


def open_loras(
    config: LoraConfig, adapter_class: type[ModelAdapter], checkpoint: Any, options: AdapterOptions
) -> OpenedLoras | None:
    """Open the adapters of `lora_modules`; None: adapters are off."""
    if not config.is_enabled:
        return None
    adapter_class.lora_bytes(checkpoint, options, 1, 1)  # refuses models without adapters
    files = []
    for module in config.lora_modules:
        with _named(module.name):
            largest = config.max_lora_rank or MAX_LORA_RANK
            files.append(open_checked(module.path, decoder_config(checkpoint), largest))
    rank = config.max_rank(max((found.rank for found in files), default=0))
    size = adapter_class.lora_bytes(checkpoint, options, config.num_slots, rank)
    return OpenedLoras(tuple(files), config.num_slots, rank, MemoryNeeds(size, 0, 0))


def load_loras(
    opened: OpenedLoras, config: LoraConfig, checkpoint: Any, parallel: ParallelConfig
) -> LoraStore:
    """Return a store with the adapters of `lora_modules`, numbered from 1."""
    store = LoraStore(decoder_config(checkpoint), parallel, opened.max_rank)
    with closed_on_error(store):
        for number, files in enumerate(opened.files, 1):
            report("loading adapters", number - 1, len(opened.files))
            with _named(config.lora_modules[number - 1].name):
                store.add(number, files, read=number <= config.num_host)
    return store


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Add the name of an adapter to a ModelLoadError."""
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"LoRA adapter {name!r}: {error}") from error
