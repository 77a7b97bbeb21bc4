"""An in-process server on an event loop that measures its CPU time per iteration."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx

from llaisys.server.app import make_app
from llaisys.server.config import ServerConfig
from llaisys.server.engine_client.start import EngineProcess
from llaisys.server.models.opening import open_models
from llaisys.server.service import SharedState
from llaisys.server.sessions.store import SessionStore


class MeteredLoop(asyncio.SelectorEventLoop):
    """Records the longest CPU time of the loop thread in one iteration, in seconds, and that of a
    garbage collection in any thread, which holds the GIL."""

    longest = longest_collection = 0.0
    _collected = 0.0

    def record_collection(self, phase: str, info: dict[str, int]) -> None:
        """Called by the garbage collector."""
        now = time.thread_time()
        if phase == "start":
            self._collected = now
        else:
            self.longest_collection = max(self.longest_collection, now - self._collected)

    def _run_once(self) -> None:
        start = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.longest = max(self.longest, time.thread_time() - start)

    async def measure(self, work: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
        """Return (result of `work`, longest iteration meanwhile)."""
        await asyncio.sleep(0)
        self.longest = self.longest_collection = 0.0
        result = await work
        await asyncio.sleep(0)  # ends the iteration in which `work` ended
        return result, self.longest


@contextlib.asynccontextmanager
async def server_client(config: ServerConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server in this process; its engine is a child process."""
    shared = SharedState(config, SessionStore(":memory:"))
    models = open_models(shared, EngineProcess(config))
    engine = models.first.engine
    try:
        await engine.start()
        await asyncio.wait_for(engine.ready.wait(), 60)
        models.first.model_loaded()
        transport = httpx.ASGITransport(make_app(shared, models))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", timeout=120
        ) as client:
            yield client
    finally:
        await models.close()
        shared.sessions.close()


def application_of(client: httpx.AsyncClient) -> Any:
    """The FastAPI application of `server_client`, inside its middleware."""
    app: Any = client._transport.app  # type: ignore[attr-defined]
    while not hasattr(app, "openapi"):
        app = app.app
    return app


def run_metered(test: Callable[[MeteredLoop], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=MeteredLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, MeteredLoop)
        gc.collect()
        gc.freeze()  # as the server does: the objects of pytest must not be scanned
        gc.callbacks.append(loop.record_collection)
        try:
            runner.run(test(loop))
        finally:
            gc.callbacks.remove(loop.record_collection)
            gc.unfreeze()
