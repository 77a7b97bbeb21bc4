"""The LoRA adapters of an engine core: names, loads and unloads, host memory.

    load -> READING -> READY <-> ON_DISK         (least recently used, beyond max_cpu_loras)
                    -> FAILED: the name stays unknown, or the request gets the error
    unload: the name is unknown at once; the weights are freed when the last request has ended

Every load has a new id, so that a reloaded adapter shares no KV cache with the one before. Requests
for an adapter that is not in host memory are pending until it is; files are read by the workers
while steps go on.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.common.lora import LoraState, check_lora_name, unknown_lora
from llaisys.common.request import Request
from llaisys.common.validation import check_text
from llaisys.engine.config import LoraConfig

logger = logging.getLogger("llaisys.engine")


# (method of LoraStore, adapter id, other arguments) -> the result of every rank
LoraCall = Callable[..., list[Any]]


@dataclass(slots=True, eq=False)
class LoraAdapter:
    """One load of a LoRA adapter."""

    lora_id: int
    name: str
    path: str
    state: LoraState


class LoadResult(NamedTuple):
    """The end of a load; `error` is None when the adapter can be used."""

    name: str
    lora_id: int
    error: Exception | None


class LoraRegistry:
    """Owned by one engine core; a stage of `Admission`. No call blocks."""

    def __init__(
        self,
        config: LoraConfig,
        call_workers: LoraCall,
        used_ids: Callable[[], set[int]],
        on_dropped: Callable[[int], None],
    ) -> None:
        """`used_ids`: adapters of unfinished requests. `on_dropped`: called before the weights of
        an unloaded adapter are freed."""
        self.is_enabled = config.is_enabled
        self.num_reads = 0  # of files, in all
        self.num_failures = 0
        self._max_host = config.num_host
        self._call = call_workers
        self._used_ids = used_ids
        self._on_dropped = on_dropped
        self._by_name: dict[str, LoraAdapter] = {}
        self._host: dict[int, LoraAdapter] = {}  # in host memory or being read, in LRU order
        self._loading: list[LoraAdapter] = []
        self._failed: list[LoraAdapter] = []  # their next use reads them again
        self._retired: list[LoraAdapter] = []  # unloaded, maybe in use
        self._next_id = 1
        for module in config.lora_modules:  # the workers have them; see Worker._load_loras
            adapter = self._new(module.name, module.path)
            self._by_name[module.name] = adapter
            if adapter.lora_id <= self._max_host:
                adapter.state = LoraState.READY
                self._host[adapter.lora_id] = adapter
                self.num_reads += 1

    def _new(self, name: str, path: str) -> LoraAdapter:
        adapter = LoraAdapter(self._next_id, name, path, LoraState.ON_DISK)
        self._next_id += 1
        return adapter

    # ---- state ---------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    @property
    def num_host(self) -> int:
        return len(self._host)

    @property
    def is_busy(self) -> bool:
        """Whether `finished_loads` should be called soon."""
        return bool(self._loading)

    # ---- loads ---------------------------------------------------------------------------------

    def load(self, name: str, path: str, in_place: bool = False) -> int:
        """Start to load an adapter and return its id; `poll` returns the end. InvalidInputError:
        the name is taken, unless `in_place` replaces that adapter."""
        check_lora_name(name)
        check_text("lora_path", path)
        self.check_enabled()
        if not in_place:
            self._check_free(name)
        adapter = self._new(name, path)
        has_room = self._make_room()
        self._call("open", adapter.lora_id, path, has_room)
        if has_room:
            self._host[adapter.lora_id] = adapter
            self.num_reads += 1
        adapter.state = LoraState.READING
        self._loading.append(adapter)
        return adapter.lora_id

    def unload(self, name: str) -> None:
        """Make a name unknown; its running and waiting requests continue."""
        self.check_enabled()
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            raise unknown_lora(name)
        self._retired.append(adapter)
        self.drop_retired()

    def check_enabled(self) -> None:
        if not self.is_enabled:
            raise InvalidInputError(
                "LoRA adapters are off; enable_lora or lora_modules turns them on", field="lora"
            )

    def _check_free(self, name: str) -> None:
        if name in self._by_name or any(other.name == name for other in self._loading):
            raise InvalidInputError(
                f"a LoRA adapter named {name!r} is already loaded", field="lora_name", value=name
            )

    # ---- requests ------------------------------------------------------------------------------

    def assign(self, requests: Sequence[Request]) -> LoraAdapter | None:
        """Set the adapter's id of requests with one name; None: they have none. InvalidInputError:
        the name is unknown."""
        name = requests[0].lora
        if not name:
            return None
        self.check_enabled()
        adapter = self._by_name.get(name)
        if adapter is None:  # after a restart its load is repeated
            adapter = next((other for other in self._loading if other.name == name), None)
        if adapter is None:
            raise unknown_lora(name)
        for request in requests:
            request.lora_id = adapter.lora_id
        return adapter

    def begin(self, requests: Sequence[Request]) -> LoraAdapter | None:
        adapter = self.assign(requests)
        if adapter is None or self._use(adapter):
            return None
        self._start_read(adapter)
        return adapter

    def poll(self, timeout: float = 0.0) -> None:
        """Free unloaded adapters; does not wait."""
        self.drop_retired()
        for adapter in self._failed:
            adapter.state = LoraState.ON_DISK
            self._host.pop(adapter.lora_id, None)
        self._failed = []

    def is_ready(self, adapter: LoraAdapter) -> bool:
        """Whether the adapter is in host memory; InvalidInputError when it cannot be read."""
        self._start_read(adapter)
        self._update(adapter)
        if adapter.state is LoraState.FAILED:
            if adapter not in self._loading and adapter not in self._failed:
                self._failed.append(adapter)
            text = f"the LoRA adapter {adapter.name!r} cannot be read"
            logger.error("%s: %s", text, self._error(adapter))
            raise InvalidInputError(text, field="lora")
        return self._use(adapter)

    def end(self, adapter: LoraAdapter) -> None:
        """Nothing to free: an adapter is evicted when no request uses it."""

    def _use(self, adapter: LoraAdapter) -> bool:
        """Whether the adapter is in host memory; makes it the most recently used one."""
        if adapter.state is not LoraState.READY:
            return False
        self._host[adapter.lora_id] = self._host.pop(adapter.lora_id)
        return True

    # ---- progress ------------------------------------------------------------------------------

    def finished_loads(self) -> list[LoadResult]:
        """Return the loads that ended since the last call."""
        results = []
        for adapter in tuple(self._loading):
            self._update(adapter)
            if adapter.state is LoraState.READING:
                continue
            self._loading.remove(adapter)
            error: Exception | None = None
            if adapter.state is LoraState.FAILED:
                error = ModelLoadError(self._error(adapter))
                self._drop(adapter)
            else:
                before = self._by_name.pop(adapter.name, None)
                self._by_name[adapter.name] = adapter
                if before is not None:  # replaced in place
                    self._retired.append(before)
                logger.info("LoRA adapter %s loaded from %s", adapter.name, adapter.path)
            results.append(LoadResult(adapter.name, adapter.lora_id, error))
        return results

    def _update(self, adapter: LoraAdapter) -> None:
        if adapter.state is LoraState.READING:
            adapter.state = LoraState.of_ranks(self._call("state", adapter.lora_id))
            self.num_failures += adapter.state is LoraState.FAILED

    def _error(self, adapter: LoraAdapter) -> str:
        """Why an adapter has failed."""
        found = self._call("error", adapter.lora_id)
        return next((error for error in found if error), "it was not read")

    def _start_read(self, adapter: LoraAdapter) -> None:
        """Read an adapter that is on disk if it fits into host memory."""
        if adapter.state is LoraState.ON_DISK and self._make_room():
            self._call("read", adapter.lora_id)
            adapter.state = LoraState.READING
            self._host[adapter.lora_id] = adapter
            self.num_reads += 1

    def _make_room(self) -> bool:
        """Evict the least recently used adapter that no request uses, if the host memory is full;
        False: all are used."""
        if len(self._host) < self._max_host:
            return True
        used = self._used_ids()
        for adapter in self._host.values():
            if adapter.state is LoraState.READY and adapter.lora_id not in used:
                self._call("evict", adapter.lora_id)
                adapter.state = LoraState.ON_DISK
                del self._host[adapter.lora_id]
                return True
        return False

    # ---- ends ----------------------------------------------------------------------------------

    def drop_retired(self) -> None:
        """Free the unloaded adapters that no request uses any more."""
        if not self._retired:
            return
        used = self._used_ids()
        for adapter in tuple(self._retired):
            if adapter.lora_id not in used:
                self._retired.remove(adapter)
                self._on_dropped(adapter.lora_id)
                self._drop(adapter)

    def _drop(self, adapter: LoraAdapter) -> None:
        self._host.pop(adapter.lora_id, None)
        self._call("drop", adapter.lora_id)
