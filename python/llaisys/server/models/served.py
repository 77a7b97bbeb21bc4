"""A model of a server: the only one, or one of several with its state, users and memory."""

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Any

from llaisys.server.config import BARE_ENGINE_BYTES
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.generation.service import Service

FIRST_PAUSE = 1.0  # seconds after a failed load without a retry; doubles with each failure
MAX_PAUSE = 60.0


DRAIN_SECONDS = 10.0  # first drain window; doubles with each abandoned drain


class State(Enum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"  # running requests finish, new ones wait
    FAILED = "failed"


class ServedModel:
    """Modified by `ModelManager` only."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.state = State.UNLOADED
        self.users = 0  # leases
        self.waiting = 0  # requests that wait for its load
        self.last_used = 0.0
        self.loaded_at = 0.0
        self.load_seconds = 0.0  # of the last load
        self.drain_window = DRAIN_SECONDS
        self.drain_after = 0.0  # no drain before this time
        self.reserved = 0  # bytes of the budget
        self.estimate = 0  # bytes, reported by the engine; 0: unknown
        self.problem: str | None = None  # why the last load or the engine failed
        self.public_error: str | None = None  # the text for clients, if it may be sent
        self.failures = 0  # consecutive, without an answered request in between
        self.retry_at = 0.0
        self.num_loads = self.num_unloads = self.num_failures = 0
        self.task: asyncio.Task[None] | None = None  # loads it
        self.cleanup: asyncio.Task[None] | None = None  # closes a dead engine
        self.unload_ended = asyncio.Event()  # not UNLOADING
        self.unload_ended.set()

    @property
    def name(self) -> str:
        return self.service.metric_name

    @property
    def is_idle(self) -> bool:
        """Ready and without requests, including disconnected ones that still run."""
        used = self.users or self.waiting or self.service.admission.open
        return self.state is State.READY and not used

    @property
    def resident(self) -> int:
        engine = self.service.engine_or_none
        return engine.usage[1] if engine is not None else 0

    def initial_bytes(self, budget: int, reserved: int) -> int:
        """Bytes to reserve before the engine starts: the last estimate, or a bare engine process if
        there is none. A model that exceeded the budget is estimated again if a bare engine fits,
        since its files may have changed."""
        has_room = reserved + BARE_ENGINE_BYTES <= budget
        if not self.estimate or (self.estimate > budget and has_room):
            return BARE_ENGINE_BYTES
        return self.estimate

    def attach(self, engine: AsyncLLMEngine) -> None:
        self.service.engine_or_none = engine

    def detach(self) -> AsyncLLMEngine | None:
        engine, self.service.engine_or_none = self.service.engine_or_none, None
        return engine

    def failed(self, reason: str, now: float, public_error: str | None = None) -> None:
        self.failures += 1
        self.num_failures += 1
        self.problem, self.public_error = reason, public_error
        self.retry_at = now + min(MAX_PAUSE, FIRST_PAUSE * 2 ** (self.failures - 1))
        self.state = State.FAILED

    def abandon_drain(self, now: float) -> None:
        """Accept requests again for as long as the drain took; the next one has twice the time."""
        if self.state is State.UNLOADING:
            self.state = State.READY
        self.drain_after = now + self.drain_window
        self.drain_window *= 2

    def succeeded(self, now: float, seconds: float) -> None:
        self.drain_window, self.drain_after = DRAIN_SECONDS, 0.0
        self.state, self.problem, self.public_error = State.READY, None, None
        self.loaded_at = self.last_used = now
        self.load_seconds = seconds
        self.num_loads += 1

    def card(self, name: str) -> dict[str, Any]:
        engine = self.service.engine_or_none
        loading = engine.loading if engine is not None else None
        card = {
            **self.service.model_card(name),
            "state": self.state.value,
            "memory": {"estimated_bytes": self.estimate or None, "resident_bytes": self.resident},
        }
        if self.state is State.FAILED and self.public_error:
            card["error"] = self.public_error
        if loading is not None:
            card["loading"] = {"stage": loading[0], "done": loading[1], "total": loading[2]}
        return card


class SingleModel:
    """The interface of `ModelManager` for one model."""

    has_several = False

    def __init__(self, service: Service) -> None:
        self.first = service

    def has_model(self, name: str) -> bool:
        return self.first.has_model(name)

    @property
    def services(self) -> list[Service]:
        return [self.first]

    async def close(self) -> None:
        await self.first.engine.close()

    async def lease(self, name: str | None) -> tuple[Service, Callable[[], None]]:
        self.first.check_model(name)
        return self.first, lambda: None

    def cards(self) -> list[dict[str, Any]]:
        return [self.card(name) for name in self.first.all_names]

    def card(self, name: str) -> dict[str, Any]:
        service = self.first
        _ = service.engine.inputs  # ready, or raises
        return {**service.model_card(service.check_model(name)), "state": "ready"}
