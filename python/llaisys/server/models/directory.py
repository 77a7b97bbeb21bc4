"""Several models within one budget of memory: loaded when a request names them, unloaded when the
room is needed or nobody has asked for a while.

    lease -> (wait for the load) -> the request runs -> release

One load at a time, in the order of the requests, so that two models that do not fit together take
turns instead of pushing each other out half-way. Room is made by unloading what is idle, the
longest unused first; when all are in use, one that has had its time takes no more requests, and
goes when those it has are answered. A request never ends because of an unload. What is wrong with a
model is answered to those who ask for it, and to nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from llaisys.common.logs import log_event
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.engine_client.start import EngineProcess
from llaisys.server.errors import ApiError
from llaisys.server.models.one import OneModel
from llaisys.server.models.served import ServedModel, State
from llaisys.server.service import Service, unknown_model

logger = logging.getLogger("llaisys.server")

LEAST_STAY = 2.0  # seconds in memory, or three times its load, before it must make room while used
LOOK_SECONDS = 1.0  # between two looks at who has been idle for too long
RETRY_SECONDS = 5

EngineMaker = Callable[[Service], AsyncLLMEngine]
Ended = Callable[[Service, AsyncLLMEngine], None]


def make_engine(service: Service) -> AsyncLLMEngine:
    return AsyncLLMEngine(service.config, EngineProcess(service.config, ask_first=True))


class ModelDirectory:
    """Lives on one event loop."""

    has_several = True

    def __init__(
        self,
        services: Sequence[Service],
        budget: int,
        keep_alive: float,
        load_timeout: float,
        *,
        max_waiting: int = 256,
        on_engine_end: Ended = lambda service, engine: None,
        make: EngineMaker = make_engine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`budget`: bytes of all engines together. `keep_alive`: seconds, 0: for ever.
        `load_timeout`: seconds that a request waits for its model at most."""
        self.models = [ServedModel(service) for service in services]
        self.budget = budget
        self.keep_alive = keep_alive
        self.load_timeout = load_timeout
        self.max_waiting = max_waiting
        self.closing = False
        self._by_name = {name: model for model in self.models for name in model.service.model_names}
        self._make = make
        self._clock = clock
        self._on_engine_end = on_engine_end
        self._load_lock = asyncio.Lock()  # first come, first served
        self._changed = asyncio.Event()  # a user less, a model less: there may be room
        self._blocked = 0  # requests that wait for any model
        self._tasks: set[asyncio.Task[None]] = set()
        self._drops: set[asyncio.Task[None]] = set()  # those of them that end an engine

    # ---- what the routes use -------------------------------------------------------------------

    @property
    def first(self) -> Service:
        return self.models[0].service

    @property
    def services(self) -> list[Service]:
        return [model.service for model in self.models]

    @property
    def reserved(self) -> int:
        """Bytes of the budget that are given out."""
        return sum(model.reserved for model in self.models)

    def knows(self, name: str) -> bool:
        return name in self._by_name

    def find(self, name: str | None) -> ServedModel:
        if name is None:
            return self.models[0]
        model = self._by_name.get(name)
        if model is None:
            raise unknown_model(name, list(self._by_name))
        return model

    def cards(self) -> list[dict[str, Any]]:
        return [model.card(name) for name, model in self._by_name.items()]

    def card(self, name: str) -> dict[str, Any]:
        return self.find(name).card(name)

    async def lease(self, name: str | None) -> tuple[Service, Callable[[], None]]:
        """The service of a model that is loaded, and what to call when it is not needed any more.
        ApiError 503 when it cannot be loaded, or not in time."""
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
                    model.failures = 0  # it works: the next failure is another matter
                self._changed.set()

        return model.service, release

    # ---- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """The first model is loaded at once: it is the one of those who do not name any."""
        self._spawn(self._unload_idle())
        self._begin_load(self.models[0])

    async def close(self) -> None:
        self.closing = True
        for task in self._tasks - self._drops:  # engines that are on their way out are let go
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        engines = [model.detach() for model in self.models]
        await asyncio.gather(*[engine.close() for engine in engines if engine is not None])

    # ---- waiting -------------------------------------------------------------------------------

    async def _wait_for(self, model: ServedModel) -> None:
        """Until the model is ready. Whoever waits is counted, so that what was loaded for it stays
        until it has had its turn."""
        if self._blocked >= self.max_waiting:
            raise ApiError(
                503,
                f"{self._blocked} requests wait for models to be loaded",
                code="models_busy",
                retry_after=RETRY_SECONDS,
            )
        self._blocked += 1
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
            self._blocked -= 1

    async def _wait_once(self, model: ServedModel) -> None:
        if self.closing:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if model.state is State.UNLOADING:
            await model.settled.wait()
            return
        pause = model.retry_at - self._clock()
        if model.state is State.FAILED and pause > 0:
            raise self._refusal(model, pause)
        task = self._begin_load(model)
        model.waiting += 1
        try:
            await asyncio.shield(task)
        finally:
            model.waiting -= 1
        if model.state is State.FAILED:
            raise self._refusal(model, model.retry_at - self._clock())

    def _refusal(self, model: ServedModel, pause: float) -> ApiError:
        """The reason is in the log: it may name files. What a client may know is said."""
        told = f": {model.told}" if model.told else ", or has ended"
        return ApiError(
            503,
            f"the model {model.name} could not be loaded{told}",
            code="model_unavailable",
            retry_after=max(1, math.ceil(pause)),
        )

    # ---- loading -------------------------------------------------------------------------------

    def _begin_load(self, model: ServedModel) -> asyncio.Task[None]:
        """The task that loads it: the one under way, or a new one."""
        if model.task is None or model.task.done():
            model.task = self._spawn(self._load(model))
        return model.task

    async def _load(self, model: ServedModel) -> None:
        """Leaves it READY or FAILED; UNLOADED when there was no room in time."""
        model.state = State.LOADING
        async with self._load_lock:
            began = self._clock()
            try:
                if model.ending is not None:
                    await asyncio.shield(model.ending)
                await self._make_room(model, model.first_need(self.budget, self.reserved))
                engine = await asyncio.to_thread(self._make, model.service)
                model.attach(engine)
                await self._open(model, engine)
                model.service.model_loaded()
                engine.on_death.append(lambda reason: self._on_death(model, engine, reason))
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
            except NoRoom:
                await self._drop(model)
                model.state = State.UNLOADED
                log_event(logger, logging.WARNING, "no room for a model", model=model.name)
            except asyncio.CancelledError:
                await self._drop(model)
                raise
            except Exception as error:
                await self._drop(model)
                told = str(error) if isinstance(error, TooLarge) else None
                model.failed(str(error), self._clock(), told)
                expected = isinstance(error, LoadError)
                log_event(
                    logger, logging.ERROR, "model not loaded", model=model.name, reason=str(error)
                )
                if not expected:
                    logger.error("unexpected", exc_info=error)

    async def _open(self, model: ServedModel, engine: AsyncLLMEngine) -> None:
        """The engine says what it needs, gets it, and loads."""
        await engine.start()
        await engine.opened.wait()
        if engine.needs is None:
            raise LoadError(engine.dead or "the engine ended")
        model.estimate = engine.needs.total
        await self._make_room(model, model.estimate)
        engine.load()
        await engine.ready.wait()
        if not engine.is_ready:
            raise LoadError(engine.dead or "the engine ended")

    async def _make_room(self, model: ServedModel, wanted: int) -> None:
        """Reserve `wanted` bytes for a model; unloads others, or waits until they can be. Raises
        NoRoom when that takes too long, and TooLarge at once when nothing would help."""
        if wanted > self.budget:
            raise TooLarge(f"it needs {wanted} bytes; the budget is {self.budget}")
        try:
            async with asyncio.timeout(self.load_timeout):
                await self._unload_others(model, wanted)
        except TimeoutError:
            raise NoRoom from None
        model.reserved = wanted

    async def _unload_others(self, model: ServedModel, wanted: int) -> None:
        while self.reserved - model.reserved + wanted > self.budget:
            self._changed.clear()
            idle = [other for other in self.models if other.is_idle and other is not model]
            if idle:
                await self._unload(min(idle, key=lambda other: other.last_used))
                continue
            victim, pause = self._next_to_go(model)
            if victim is not None:
                await self._retire(victim)
            else:
                await self._wait_changed(pause)

    def _next_to_go(self, model: ServedModel) -> tuple[ServedModel | None, float | None]:
        """The longest loaded of those in use that have had their time; or the seconds until the
        first of them has (None: whenever something changes)."""
        now, waits = self._clock(), []
        for other in self.models:
            if other.state is State.READY and other is not model:
                stay = max(LEAST_STAY, 3 * other.load_seconds)
                waits.append((other.loaded_at + stay - now, other))
        if not waits:
            return None, None
        pause, oldest = min(waits, key=lambda row: row[0])
        return (oldest, None) if pause <= 0 else (None, pause)

    async def _wait_changed(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    # ---- unloading -----------------------------------------------------------------------------

    async def _retire(self, model: ServedModel) -> None:
        """Takes no more requests, and is unloaded when those it has are answered. Given up half-way
        it goes on as before."""
        model.state = State.UNLOADING
        model.settled.clear()
        try:
            while model.users or model.waiting or model.service.admission.open:
                self._changed.clear()
                await self._wait_changed(LOOK_SECONDS)
            if model.state is State.UNLOADING:  # it may have died meanwhile
                await self._unload(model)
        except BaseException:
            if model.state is State.UNLOADING and model.service.engine_or_none is not None:
                model.state = State.READY
            raise
        finally:
            model.settled.set()

    async def _unload(self, model: ServedModel) -> None:
        model.state = State.UNLOADING
        model.settled.clear()
        resident = model.resident
        await asyncio.shield(self._begin_drop(model))
        model.num_unloads += 1
        model.state = State.UNLOADED
        model.settled.set()
        log_event(logger, logging.INFO, "model unloaded", model=model.name, resident_bytes=resident)

    def _begin_drop(self, model: ServedModel) -> asyncio.Task[None]:
        task = self._spawn(self._drop(model))
        self._drops.add(task)
        task.add_done_callback(self._drops.discard)
        return task

    async def _drop(self, model: ServedModel) -> None:
        """End its engine, if there is one, and give its memory back."""
        engine = model.detach()
        if engine is not None:
            self._on_engine_end(model.service, engine)
            await engine.close()
        model.reserved = 0
        self._changed.set()

    def _on_death(self, model: ServedModel, engine: AsyncLLMEngine, reason: str) -> None:
        """The engine of a loaded model ended by itself: its requests have been told."""
        if self.closing or model.service.engine_or_none is not engine:
            return
        model.failed(reason, self._clock())
        log_event(logger, logging.ERROR, "model ended", model=model.name, reason=reason)
        model.settled.set()
        model.ending = self._begin_drop(model)

    async def _unload_idle(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.unload_idle_once()

    async def unload_idle_once(self) -> None:
        """What nobody has used for `keep_alive` seconds goes."""
        if not self.keep_alive:
            return
        for model in self.models:
            if model.is_idle and self._clock() - model.last_used > self.keep_alive:
                await self._unload(model)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


Models = OneModel | ModelDirectory


class NoRoom(Exception):
    """The others were in use for too long."""


class LoadError(Exception):
    """Why a model is not there; for the log."""


class TooLarge(LoadError):
    """It would not fit if it were alone. The text is numbers, which clients may see."""
