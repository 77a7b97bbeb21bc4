"""The LoRA adapters of an engine core: names, loads and unloads, host memory.

    load -> READING -> READY <-> ON_DISK         (least recently used, beyond max_cpu_loras)
                    -> FAILED: the name stays unknown, or the request gets the error
    unload: the name is unknown at once; the weights are freed when the last request has ended

Every load has a new id, so that a reloaded adapter shares no KV cache with the one before. Requests
for an adapter that is not in host memory are pending until it is; files are read by the workers
while steps go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.common.lora import LoraState, check_lora_name, unknown_lora
from llaisys.common.request import Request
from llaisys.common.validation import check_text
from llaisys.engine.config import LoraConfig

logger = logging.getLogger("llaisys.engine")


class LoraWorkers(Protocol):
    """The methods of Executor that the registry uses."""

    def open_lora(self, lora_id: int, path: str, read: bool) -> None: ...
    def read_lora(self, lora_id: int) -> None: ...
    def evict_lora(self, lora_id: int) -> None: ...
    def drop_lora(self, lora_id: int) -> None: ...
    def lora_state(self, lora_id: int) -> LoraState: ...
    def lora_error(self, lora_id: int) -> str: ...


@dataclass(slots=True, eq=False)
class LoraAdapter:
    """One load of a LoRA adapter."""

    lora_id: int
    name: str
    path: str
    state: LoraState


class PendingLora(NamedTuple):
    """The choices of a prompt whose adapter is not in host memory."""

    requests: Sequence[Request]
    deadline: float | None
    adapter: LoraAdapter


class LoadResult(NamedTuple):
    """The end of a load; `error` is None when the adapter can be used."""

    name: str
    lora_id: int
    error: Exception | None


class LoraRegistry:
    """Owned by one engine core. No call blocks."""

    def __init__(
        self,
        config: LoraConfig,
        workers: LoraWorkers,
        used_ids: Callable[[], set[int]],
        on_dropped: Callable[[int], None],
    ) -> None:
        """`used_ids`: adapters of unfinished requests. `on_dropped`: called before the weights of
        an unloaded adapter are freed."""
        self.is_enabled = config.is_enabled
        self.num_reads = 0  # of files, in all
        self.num_failures = 0
        self._max_host = config.num_host
        self._workers = workers
        self._used_ids = used_ids
        self._on_dropped = on_dropped
        self._by_name: dict[str, LoraAdapter] = {}
        self._host: dict[int, LoraAdapter] = {}  # in host memory or being read, in LRU order
        self._loading: list[LoraAdapter] = []
        self._pending: list[PendingLora] = []
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
    def num_pending(self) -> int:
        """Requests that wait for their adapter."""
        return sum(len(pending.requests) for pending in self._pending)

    @property
    def is_busy(self) -> bool:
        """Whether `poll` should be called soon."""
        return bool(self._loading or self._pending)

    def is_pending(self, request: Request) -> bool:
        return any(request in pending.requests for pending in self._pending)

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
        self._workers.open_lora(adapter.lora_id, path, has_room)
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

    def is_ready(self, adapter: LoraAdapter) -> bool:
        """Whether requests can be queued now; marks the adapter as used."""
        if adapter.state is not LoraState.READY:
            return False
        self._host[adapter.lora_id] = self._host.pop(adapter.lora_id)
        return True

    def add(
        self, requests: Sequence[Request], deadline: float | None, adapter: LoraAdapter
    ) -> None:
        """Keep requests until `poll` returns them."""
        self._pending.append(PendingLora(requests, deadline, adapter))
        self._start_reads()

    def expire(self, now: float) -> list[PendingLora]:
        """Remove and return the pending requests whose deadline has passed."""
        expired = [p for p in self._pending if p.deadline is not None and p.deadline <= now]
        self._pending = [p for p in self._pending if p not in expired]
        return expired

    def cancel(self, request_id: str) -> Request | None:
        """Remove a pending request and return it; None: it is not pending."""
        for index, pending in enumerate(self._pending):
            for request in pending.requests:
                if request.request_id == request_id:
                    rest = [other for other in pending.requests if other is not request]
                    replaced = [pending._replace(requests=rest)] if rest else []
                    self._pending[index : index + 1] = replaced
                    return request
        return None

    # ---- progress ------------------------------------------------------------------------------

    def poll(self) -> tuple[list[PendingLora], list[tuple[PendingLora, Exception]]]:
        """Return (requests to queue, failed requests with their errors)."""
        self.drop_retired()
        if not self._pending:
            return [], []
        self._start_reads()
        ready: list[PendingLora] = []
        failed: list[tuple[PendingLora, Exception]] = []
        for pending in tuple(self._pending):
            adapter = pending.adapter
            self._update(adapter)
            if self.is_ready(adapter):
                ready.append(pending)
            elif adapter.state is LoraState.FAILED:
                error = ModelLoadError(self._workers.lora_error(adapter.lora_id))
                failed.append((pending, error))
        done = [*ready, *(pending for pending, _ in failed)]
        self._pending = [p for p in self._pending if p not in done]
        for adapter in {pending.adapter for pending, _ in failed}:
            if adapter in self._loading:
                continue  # `finished_loads` ends it
            self.num_failures += 1
            adapter.state = LoraState.ON_DISK  # the next request tries again
            del self._host[adapter.lora_id]
        return ready, failed

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
                error = ModelLoadError(self._workers.lora_error(adapter.lora_id))
                self.num_failures += 1
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
            adapter.state = self._workers.lora_state(adapter.lora_id)

    def _start_reads(self) -> None:
        """Read the adapters of pending requests that fit into host memory, in order."""
        for pending in self._pending:
            adapter = pending.adapter
            if adapter.state is not LoraState.ON_DISK:
                continue
            if not self._make_room():
                return
            self._workers.read_lora(adapter.lora_id)
            adapter.state = LoraState.READING
            self._host[adapter.lora_id] = adapter
            self.num_reads += 1

    def _make_room(self) -> bool:
        """Evict the least recently used adapter that no request uses, if the host memory is full;
        False: all are used."""
        if len(self._host) < self._max_host:
            return True
        used = self._used_ids() | {pending.adapter.lora_id for pending in self._pending}
        for adapter in self._host.values():
            if adapter.state is LoraState.READY and adapter.lora_id not in used:
                self._workers.evict_lora(adapter.lora_id)
                adapter.state = LoraState.ON_DISK
                del self._host[adapter.lora_id]
                return True
        return False

    # ---- ends ----------------------------------------------------------------------------------

    def drop_retired(self) -> None:
        """Free the unloaded adapters that no request uses any more."""
        if not self._retired:
            return
        used = self._used_ids() | {pending.adapter.lora_id for pending in self._pending}
        for adapter in tuple(self._retired):
            if adapter.lora_id not in used:
                self._retired.remove(adapter)
                self._on_dropped(adapter.lora_id)
                self._drop(adapter)

    def _drop(self, adapter: LoraAdapter) -> None:
        self._host.pop(adapter.lora_id, None)
        self._workers.drop_lora(adapter.lora_id)
