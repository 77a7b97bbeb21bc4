"""Several models within one memory budget: loaded on demand, unloaded when idle or for another one.

    lease -> (wait for the load) -> the request runs -> release

One load at a time, in request order, so that models that do not fit together alternate. Memory is
freed by unloading idle models, least recently used first. When all are in use, the longest loaded
one that has had its minimum residency is drained: it accepts no new requests and is unloaded after
its last one. A drain that does not end within its window is abandoned: the model accepts requests
for as long as the window, then the next drain has twice the window. So a long request delays the
others by at most half of the time, and a switch succeeds once the window exceeds the longest
request. An unload never ends a request. A failed load fails only the requests for that model.
"""

import asyncio
import contextlib
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from llaisys.common.logs import log_event
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.engine_client.start import EngineProcess
from llaisys.server.errors import ApiError
from llaisys.server.generation.service import Service, unknown_model
from llaisys.server.models.served import ServedModel, SingleModel, State
from llaisys.server.thread_pool import TaskSet, current_owner

logger = logging.getLogger("llaisys.server")

MIN_RESIDENCY = 2.0  # seconds (or 3 load times) before a model in use may be drained
POLL_SECONDS = 1.0  # interval of idle checks
RETRY_SECONDS = 5
MAX_PUBLIC_REASON = 500  # characters

EngineFactory = Callable[[Service], AsyncLLMEngine]
EngineEndCallback = Callable[[Service, AsyncLLMEngine], None]
ModelCheck = Callable[[Service], Awaitable[str | None]]  # why it cannot be loaded; None: it can


def make_engine(service: Service) -> AsyncLLMEngine:
    return AsyncLLMEngine(service.config, EngineProcess(service.config, wait_for_memory=True))


async def check_model(service: Service) -> str | None:
    """Open the files of a model in an engine process that loads no weights."""
    engine = await asyncio.to_thread(make_engine, service)
    try:
        await engine.start()
        await engine.estimated.wait()
        return None if engine.memory_estimate is not None else engine.dead or "the engine ended"
    finally:
        await engine.close()


class ModelManager:
    """Not thread-safe: used on one event loop."""

    has_several = True

    def __init__(
        self,
        services: Sequence[Service],
        budget: int,
        keep_alive: float,
        load_timeout: float,
        *,
        max_waiting: int = 256,
        on_engine_end: EngineEndCallback = lambda service, engine: None,
        make: EngineFactory = make_engine,
        check: ModelCheck | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`budget`: bytes of all engines together. `keep_alive`: seconds until an idle model is
        unloaded, 0: never. `load_timeout`: longest wait of a request for its model, in seconds.
        `check`: run at start for every model but the first."""
        self.models = [ServedModel(service) for service in services]
        self.budget = budget
        self.keep_alive = keep_alive
        self.load_timeout = load_timeout
        self.max_waiting = max_waiting
        self.closing = False
        self._by_name = {name: model for model in self.models for name in model.service.model_names}
        self._make = make
        self._check = check
        self._clock = clock
        self._on_engine_end = on_engine_end
        self._load_lock = asyncio.Lock()  # FIFO
        self._changed = asyncio.Event()  # memory may have become available
        self._blocked: Counter[str] = Counter()  # requests that wait for a load, by owner
        self._tasks = TaskSet()
        self._closings: set[asyncio.Task[None]] = set()  # the subset that closes engines

    # ---- interface of the routes ---------------------------------------------------------------

    @property
    def first(self) -> Service:
        return self.models[0].service

    @property
    def services(self) -> list[Service]:
        return [model.service for model in self.models]

    @property
    def reserved(self) -> int:
        return sum(model.reserved for model in self.models)

    def has_model(self, name: str) -> bool:
        return self._find(name) is not None

    def find(self, name: str | None) -> ServedModel:
        if name is None:
            return self.models[0]
        model = self._find(name)
        if model is None:
            raise unknown_model(name, [n for m in self.models for n in m.service.all_names])
        return model

    def _find(self, name: str) -> ServedModel | None:
        """The model of a name or of an adapter's name."""
        found = self._by_name.get(name)
        return found or next((m for m in self.models if name in m.service.loras), None)

    def cards(self) -> list[dict[str, Any]]:
        return [model.card(name) for model in self.models for name in model.service.all_names]

    def card(self, name: str) -> dict[str, Any]:
        return self.find(name).card(name)

    async def lease(self, name: str | None) -> tuple[Service, Callable[[], None]]:
        """Load a model if needed; return its service and a function that ends the lease. Raises
        ApiError 503 when it cannot be loaded in time."""
        model = self.find(name)
        if model.state is not State.READY:
            await self._wait_for(model)
        model.users += 1
        model.last_used = self._clock()
        engine, released = model.service.engine, False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                model.users -= 1
                model.last_used = self._clock()
                if model.service.engine_or_none is engine and engine.dead is None:
                    model.failures = 0  # it works
                self._changed.set()

        return model.service, release

    # ---- start and close -----------------------------------------------------------------------

    async def start(self) -> None:
        """Load the first model, the default of requests without a model name."""
        self._tasks.spawn(self._unload_idle())
        self._begin_load(self.models[0])
        if self._check is not None:
            self._tasks.spawn(self._check_others(self._check))

    async def _check_others(self, check: ModelCheck) -> None:
        """Find models that cannot be loaded before a request does, one after the other."""
        await asyncio.shield(self._begin_load(self.models[0]))
        for model in self.models[1:]:
            if model.state is not State.UNLOADED:
                continue
            reason = await check(model.service)
            if reason is not None and model.state is State.UNLOADED:
                model.failed(reason, self._clock(), public_reason(reason))
                self._log_error("model cannot be loaded", model, reason)

    async def close(self) -> None:
        self.closing = True
        for task in self._tasks - self._closings:  # finish closing engines
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        engines = [model.detach() for model in self.models]
        await asyncio.gather(*[engine.close() for engine in engines if engine is not None])

    # ---- waiting -------------------------------------------------------------------------------

    async def _wait_for(self, model: ServedModel) -> None:
        """Wait until the model is ready. Waiting requests are counted: a model loaded for them is
        not idle."""
        owner = current_owner.get()
        total, own = self._blocked.total(), self._blocked[owner]
        if total >= self.max_waiting or (owner and own >= max(1, self.max_waiting // 2)):
            raise ApiError(
                503,
                f"{total} requests wait for models to be loaded",
                code="models_busy",
                retry_after=RETRY_SECONDS,
            )
        self._blocked[owner] += 1
        try:
            async with asyncio.timeout(self.load_timeout):
                while model.state is not State.READY:
                    await self._wait_once(model)
        except TimeoutError:
            raise ApiError(
                503,
                f"the model {model.name} was not loaded within {self.load_timeout:g} s; "
                "others are in use",
                code="model_load_timeout",
                retry_after=RETRY_SECONDS,
            ) from None
        finally:
            self._blocked[owner] -= 1
            if not self._blocked[owner]:
                del self._blocked[owner]

    async def _wait_once(self, model: ServedModel) -> None:
        if self.closing:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if model.state is State.UNLOADING:
            await model.unload_ended.wait()
            return
        pause = model.retry_at - self._clock()
        if model.state is State.FAILED and pause > 0:
            raise self._load_error(model, pause)
        task = self._begin_load(model)
        model.waiting += 1
        try:
            await asyncio.shield(task)
        finally:
            model.waiting -= 1
        if model.state is State.FAILED:
            raise self._load_error(model, model.retry_at - self._clock())

    def _load_error(self, model: ServedModel, pause: float) -> ApiError:
        """The response to requests for a failed model: `public_error`. The log has the whole
        reason."""
        reason = f": {model.public_error}" if model.public_error else ", or has ended"
        return ApiError(
            503,
            f"the model {model.name} could not be loaded{reason}",
            code="model_unavailable",
            retry_after=max(1, math.ceil(pause)),
        )

    # ---- loading -------------------------------------------------------------------------------

    def _begin_load(self, model: ServedModel) -> asyncio.Task[None]:
        """Return the task that loads the model, started if there is none."""
        if model.task is None or model.task.done():
            model.task = self._tasks.spawn(self._load(model))
        return model.task

    async def _load(self, model: ServedModel) -> None:
        """Load a model. Leaves it READY, FAILED, or UNLOADED when memory was not freed in time."""
        model.state = State.LOADING
        async with self._load_lock:
            began = self._clock()
            try:
                if model.cleanup is not None:
                    await asyncio.shield(model.cleanup)
                await self._reserve(model, model.initial_bytes(self.budget, self.reserved))
                engine = await asyncio.to_thread(self._make, model.service)
                model.attach(engine)
                await self._open(model, engine)
                model.service.model_loaded()
                engine.on_death.append(lambda reason: self._on_engine_death(model, engine, reason))
                model.succeeded(self._clock(), self._clock() - began)
                log_event(
                    logger,
                    logging.INFO,
                    "model loaded",
                    model=model.name,
                    seconds=round(model.load_seconds, 2),
                    estimated_bytes=model.estimate,
                    reserved_bytes=self.reserved,
                )
            except MemoryTimeout:
                await self._close_engine(model)
                model.state = State.UNLOADED
                log_event(logger, logging.WARNING, "no memory for a model", model=model.name)
            except asyncio.CancelledError:
                await self._close_engine(model)
                raise
            except Exception as error:
                await self._close_engine(model)
                reason, is_expected = str(error), isinstance(error, LoadError)
                model.failed(reason, self._clock(), public_reason(reason) if is_expected else None)
                self._log_error("model not loaded", model, reason)
                if not is_expected:
                    logger.error("unexpected", exc_info=error)

    async def _open(self, model: ServedModel, engine: AsyncLLMEngine) -> None:
        """Start the engine, reserve the memory of its estimate, and let it load."""
        await engine.start()
        await engine.estimated.wait()
        if engine.memory_estimate is None:
            raise LoadError(engine.dead or "the engine ended")
        model.estimate = engine.memory_estimate.total
        await self._reserve(model, model.estimate)
        engine.load()
        await engine.ready.wait()
        if not engine.is_ready:
            raise LoadError(engine.dead or "the engine ended")

    async def _reserve(self, model: ServedModel, size: int) -> None:
        """Reserve `size` bytes for a model; unload others, waiting until they can be. Raises
        MemoryTimeout after `load_timeout`, ModelTooLarge if `size` exceeds the budget."""
        if size > self.budget:
            raise ModelTooLarge(f"it needs {size} bytes; the budget is {self.budget}")
        try:
            async with asyncio.timeout(self.load_timeout):
                await self._unload_others(model, size)
        except TimeoutError:
            raise MemoryTimeout from None
        model.reserved = size

    async def _unload_others(self, model: ServedModel, size: int) -> None:
        while self.reserved - model.reserved + size > self.budget:
            self._changed.clear()
            idle = [other for other in self.models if other.is_idle and other is not model]
            if idle:
                await self._unload(min(idle, key=lambda other: other.last_used))
                continue
            victim, pause = self._next_to_drain(model)
            if victim is not None:
                await self._drain(victim)
            else:
                await self._wait_changed(pause)

    def _next_to_drain(self, model: ServedModel) -> tuple[ServedModel | None, float | None]:
        """Return (model, None): the longest loaded model past its minimum residency and its last
        drain; else (None, seconds until the first one is; None: wait for a change)."""
        now, waits = self._clock(), []
        for other in self.models:
            if other.state is State.READY and other is not model:
                residency = max(MIN_RESIDENCY, 3 * other.load_seconds)
                waits.append((max(other.loaded_at + residency, other.drain_after) - now, other))
        if not waits:
            return None, None
        pause, oldest = min(waits, key=lambda row: row[0])
        return (oldest, None) if pause <= 0 else (None, pause)

    async def _wait_changed(self, seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    # ---- unloading -----------------------------------------------------------------------------

    async def _drain(self, model: ServedModel) -> None:
        """Stop new requests to a model and unload it after its last one. After its drain window, or
        when cancelled, the model is READY again."""
        model.state = State.UNLOADING
        model.unload_ended.clear()
        end = self._clock() + model.drain_window
        try:
            while model.users or model.waiting or model.service.admission.open:
                left = end - self._clock()
                if left <= 0:
                    model.abandon_drain(self._clock())
                    return
                self._changed.clear()
                await self._wait_changed(min(left, POLL_SECONDS))
            if model.state is State.UNLOADING:  # the engine may have died
                await self._unload(model)
        except BaseException:
            if model.state is State.UNLOADING and model.service.engine_or_none is not None:
                model.state = State.READY
            raise
        finally:
            model.unload_ended.set()

    async def _unload(self, model: ServedModel) -> None:
        model.state = State.UNLOADING
        model.unload_ended.clear()
        resident = model.resident
        await asyncio.shield(self._start_closing(model))
        model.num_unloads += 1
        model.state = State.UNLOADED
        model.unload_ended.set()
        log_event(logger, logging.INFO, "model unloaded", model=model.name, resident_bytes=resident)

    def _start_closing(self, model: ServedModel) -> asyncio.Task[None]:
        task = self._tasks.spawn(self._close_engine(model))
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)
        return task

    async def _close_engine(self, model: ServedModel) -> None:
        """Close the model's engine, if any, and release its reservation."""
        engine = model.detach()
        if engine is not None:
            self._on_engine_end(model.service, engine)
            await engine.close()
        model.reserved = 0
        self._changed.set()

    def _on_engine_death(self, model: ServedModel, engine: AsyncLLMEngine, reason: str) -> None:
        """Called when the engine of a loaded model dies; its requests have already failed."""
        if self.closing or model.service.engine_or_none is not engine:
            return
        model.failed(reason, self._clock())
        self._log_error("model ended", model, reason)
        model.unload_ended.set()
        model.cleanup = self._start_closing(model)

    @staticmethod
    def _log_error(event: str, model: ServedModel, reason: str) -> None:
        log_event(logger, logging.ERROR, event, model=model.name, reason=reason)

    async def _unload_idle(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.unload_idle_once()

    async def unload_idle_once(self) -> None:
        """Unload models idle for `keep_alive` seconds."""
        if not self.keep_alive:
            return
        for model in self.models:
            if model.is_idle and self._clock() - model.last_used > self.keep_alive:
                await self._unload(model)


Models = SingleModel | ModelManager


def load_error(reason: str) -> str:
    """Why a model could not be loaded, without the names of what failed."""
    return reason.removeprefix("the engine failed: ").removeprefix("ModelLoadError: ")


def public_reason(reason: str) -> str:
    """A reason for clients: of a path only the last part, and no list of all known names."""
    text = load_error(reason)
    text = re.sub(r"(?<![\w.])[~.]{0,2}/(?:[^\s:'\"`/]+/)*([^\s:'\"`/]+)", r"\1", text)
    return re.sub(r"; known: [^;]*", "", text)[:MAX_PUBLIC_REASON]


class MemoryTimeout(Exception):
    """Memory was not freed in time: other models were in use."""


class LoadError(Exception):
    """Why a load failed; for the log."""


class ModelTooLarge(LoadError):
    """The model exceeds the whole budget. Its text has only numbers and is sent to clients."""
