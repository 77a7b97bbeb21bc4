"""One of several models: where it stands, who uses it, what it takes."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any

from llaisys.server.config import BARE_ENGINE_BYTES
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.service import Service

FIRST_PAUSE = 1.0  # seconds after a failure in which the model is not tried again; then doubled
MAX_PAUSE = 60.0


class State(Enum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"  # those who use it finish, nobody else begins
    FAILED = "failed"


class ServedModel:
    """Changed by `ModelDirectory` only."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.state = State.UNLOADED
        self.users = 0  # requests that use it
        self.waiting = 0  # requests that wait until it is loaded
        self.last_used = 0.0
        self.loaded_at = 0.0
        self.load_seconds = 0.0  # of the last load
        self.reserved = 0  # bytes of the budget that it holds
        self.estimate = 0  # bytes that it said it needs; 0: not known yet
        self.problem: str | None = None  # why the last load, or the engine, failed
        self.told: str | None = None  # of that, what clients may see
        self.failures = 0  # in a row, without a request that was answered in between
        self.retry_at = 0.0
        self.num_loads = self.num_unloads = self.num_failures = 0
        self.task: asyncio.Task[None] | None = None  # loads it
        self.ending: asyncio.Task[None] | None = None  # clears up after it died
        self.settled = asyncio.Event()  # not UNLOADING
        self.settled.set()

    @property
    def name(self) -> str:
        return self.service.metric_name

    @property
    def is_idle(self) -> bool:
        """Nothing would be lost with it: no request, not even one that nobody reads any more."""
        used = self.users or self.waiting or self.service.admission.open
        return self.state is State.READY and not used

    @property
    def resident(self) -> int:
        """Bytes that its engine process really has in memory."""
        engine = self.service.engine_or_none
        return engine.usage[1] if engine is not None else 0

    def first_need(self, budget: int, reserved: int) -> int:
        """Bytes to begin a load with: what it said before, or an engine that can be asked. One that
        was larger than the budget is asked again, for its files may be others by now, where that
        takes nobody's place."""
        has_room = reserved + BARE_ENGINE_BYTES <= budget
        if not self.estimate or (self.estimate > budget and has_room):
            return BARE_ENGINE_BYTES
        return self.estimate

    def attach(self, engine: AsyncLLMEngine) -> None:
        self.service.engine_or_none = engine

    def detach(self) -> AsyncLLMEngine | None:
        engine, self.service.engine_or_none = self.service.engine_or_none, None
        return engine

    def failed(self, reason: str, now: float, told: str | None = None) -> None:
        self.failures += 1
        self.num_failures += 1
        self.problem, self.told = reason, told
        self.retry_at = now + min(MAX_PAUSE, FIRST_PAUSE * 2 ** (self.failures - 1))
        self.state = State.FAILED

    def succeeded(self, now: float, seconds: float) -> None:
        self.state, self.problem, self.told = State.READY, None, None
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
        if loading is not None:
            card["loading"] = {"stage": loading[0], "done": loading[1], "total": loading[2]}
        return card
