"""The life of the server: start, readiness, drain, exit status."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import uvicorn
from starlette.types import ASGIApp

from llaisys.common.errors import InvalidInputError
from llaisys.common.logs import log_event
from llaisys.common.progress import ProgressLine
from llaisys.server.config import Limits, ServerConfig, default_session_file
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.engine_client.start import EngineProcess
from llaisys.server.generation.service import Service, SharedState, reload_keys
from llaisys.server.http.protocol import limited_protocol
from llaisys.server.models.manager import Models, load_error
from llaisys.server.models.opening import open_models
from llaisys.server.models.served import SingleModel
from llaisys.server.sessions.file import SessionFileInUseError
from llaisys.server.sessions.store import SessionStore
from llaisys.server.thread_pool import TaskSet
from llaisys.server.tracing import TraceRequests, open_tracer
from llaisys.tokenization import Tokenizer as _Tokenizer  # noqa: F401  (imported while the model loads)

logger = logging.getLogger("llaisys.server")

POLL_SECONDS = 0.1  # interval of load progress updates
LOG_SECONDS = 4.0  # interval of log lines within one load stage


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: `Lifecycle` decides when to stop."""

    @classmethod
    def of(cls, app: ASGIApp, limits: Limits, **options: Any) -> Self:
        """`options`: further ones of uvicorn.Config."""
        config = uvicorn.Config(
            app,
            http=limited_protocol(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            **options,
        )
        return cls(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Lifecycle:
    """Starts the models and handles signals: the first drains, the second aborts."""

    def __init__(self, shared: SharedState, models: Models, server: Server, url: str) -> None:
        self.shared = shared
        self.models = models
        self.server = server
        self.url = url
        self.status = 0
        self._draining: asyncio.Task[None] | None = None
        self._tasks = TaskSet()

    async def run(self, listener: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal, number)
        if self.shared.config.api_key_file is not None:
            loop.add_signal_handler(signal.SIGHUP, self.on_hangup)
        log_event(logger, logging.INFO, "listening", url=self.url)  # the web page already works
        models = self.models
        if isinstance(models, SingleModel):
            models.first.engine.on_death.append(self.on_death)
            await models.first.engine.start()
            self._tasks.spawn(self._announce(models.first))
        else:
            await models.start()
            count = len(models.models)
            print(f"llaisys: serving {count} models at {self.url}", flush=True)
        try:
            await self.server.serve(sockets=[listener])
        finally:
            await models.close()
            self.shared.sessions.close()
        return self.status

    async def _announce(self, service: Service) -> None:
        await self._show_loading(service.engine)
        if service.engine.dead is not None:
            print(f"error: {load_error(service.engine.dead)}", file=sys.stderr, flush=True)
        if not service.engine.is_ready:
            return
        service.model_loaded()
        gc.collect()
        gc.freeze()  # exclude permanent objects from later collections
        name, info = service.model_names[0], service.info
        log_event(logger, logging.INFO, "ready", model=name, max_model_len=info.max_model_len)
        print(f"llaisys: serving {name} at {self.url}", flush=True)

    async def _show_loading(self, engine: AsyncLLMEngine) -> None:
        """Show the load progress until the engine is ready or has failed: one updated line on a
        terminal; elsewhere a log line per stage, and every LOG_SECONDS within one."""
        stage, logged = "", 0.0
        line = ProgressLine(sys.stderr) if sys.stderr.isatty() else None
        while not engine.ready.is_set():
            loading = engine.loading
            if loading is not None and line is not None:
                line.show(*loading)
            elif loading is not None and loading[0] != stage:
                stage, logged = loading[0], time.monotonic()
                log_event(logger, logging.INFO, "loading", stage=stage)
            elif loading is not None and time.monotonic() - logged > LOG_SECONDS:
                logged = time.monotonic()
                done = {"done": loading[1], "total": loading[2]} if loading[2] else {}
                log_event(logger, logging.INFO, "still loading", stage=stage, **done)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.ready.wait(), POLL_SECONDS)
        if line is not None:
            line.erase()

    def on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._draining is None:
            log_event(logger, logging.INFO, "draining", signal=name, open=self._open)
            self._close_admission("the server is shutting down")
            self._draining = self._tasks.spawn(self._drain())
        elif not self.server.should_exit:
            log_event(logger, logging.WARNING, "aborting", signal=name)
            self.status = 1
            self._draining.cancel()
            self._tasks.spawn(self._abort())

    def on_hangup(self) -> None:
        """Reload the key file. An invalid file changes nothing."""
        try:
            reload_keys(self.shared, self.models.services)
        except InvalidInputError as error:
            log_event(logger, logging.ERROR, "invalid key file; keys unchanged", error=str(error))
        else:
            log_event(logger, logging.INFO, "keys", count=len(self.shared.keys))

    async def _drain(self) -> None:
        """Wait for open requests, then stop; abort them after `drain_timeout`."""
        deadline = asyncio.get_running_loop().time() + self.shared.config.drain_timeout
        while self._open:
            if asyncio.get_running_loop().time() > deadline:
                await self._abort()
                return
            await asyncio.sleep(0.02)
        self.server.should_exit = True

    async def _abort(self) -> None:
        """End all generations with reason `abort`, then close the connections."""
        for generation in self.shared.registry.all():
            await generation.cancel()
        for _ in range(100):
            if not self._open:
                break
            await asyncio.sleep(0.02)
        self.server.should_exit = self.server.force_exit = True

    def on_death(self, reason: str) -> None:
        self.status = 1
        self._close_admission("the engine has died")
        self._tasks.spawn(self._exit_dead())

    async def _exit_dead(self) -> None:
        """Stop after `exit_delay`. Open requests have failed; /health returns 503."""
        await asyncio.sleep(self.shared.config.health.exit_delay)
        self.server.should_exit = self.server.force_exit = True

    @property
    def _open(self) -> int:
        return sum(service.admission.open for service in self.models.services)

    def _close_admission(self, reason: str) -> None:
        for service in self.models.services:
            service.admission.closed = reason


def open_sessions(config: ServerConfig, port: int) -> SessionStore:
    """Open the session file. If another server uses the default one, open a file named after the
    port and log a warning; a configured file is never replaced."""
    path = config.session_file or default_session_file()
    limits = config.limits
    arguments = limits.max_sessions, limits.max_session_bytes, config.max_session_bytes_per_key
    try:
        return SessionStore(path, *arguments)
    except SessionFileInUseError as error:
        if config.session_file is not None:
            raise
        other = path.with_name(f"{path.stem}-{port}{path.suffix}")
        logger.warning("%s; this server uses %s", str(error).partition(";")[0], other)
        return SessionStore(other, *arguments)


async def run_server(
    make_app: Callable[[SharedState, Models], ASGIApp],
    config: ServerConfig,
    process: EngineProcess | None,
    listener: socket.socket,
    url: str,
) -> int:
    """Serve until a signal or the death of the engine; return the exit status. `process`: the
    started engine of a single model; None with several models."""
    shared = SharedState(config, open_sessions(config, listener.getsockname()[1]))
    models = open_models(shared, process)
    app, provider = make_app(shared, models), None
    if config.otlp_traces_endpoint is not None:
        tracer, provider = open_tracer(config.otlp_traces_endpoint)
        app = TraceRequests(app, tracer)
    server = Server.of(
        app,
        config.limits,
        timeout_graceful_shutdown=5,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_keyfile_password=config.ssl_keyfile_password,
    )
    lifecycle = Lifecycle(shared, models, server, url)
    try:
        return await lifecycle.run(listener)
    finally:
        if provider is not None:
            await asyncio.to_thread(provider.shutdown)  # flushes spans
