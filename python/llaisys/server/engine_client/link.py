"""The API process's connection to an engine process: messages and the watchdog."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from llaisys.common.logs import log_event
from llaisys.processes.channel import Context, bind_receiver, connect_sender, decode_or_none, encode
from llaisys.processes.child import EXIT_FAILED
from llaisys.processes.watchdog import TICK, Watchdog
from llaisys.server.config import ServerConfig
from llaisys.server.engine_client.deltas import join_outputs
from llaisys.server.engine_client.messages import (
    EngineStats,
    Failed,
    FromEngine,
    Heartbeat,
    Outputs,
    Ready,
    Rejected,
    Shutdown,
    ToEngine,
    decode_from_engine,
)
from llaisys.server.engine_client.start import EngineProcess
from llaisys.server.errors import EngineDeadError, is_fault

logger = logging.getLogger("llaisys.server")

CLOSE_GRACE = 5.0
MAX_DRAIN = 0.01  # seconds of consecutive message handling before other tasks run
MAX_JOINED = 32  # messages that are handled together


class EngineLink:
    """Messages in both directions, and the watchdog of the process.

    `on_message` gets every message but heartbeats. `on_death` is called once, with the reason, when
    the engine ends or is declared dead; not after `close`.
    """

    def __init__(
        self,
        config: ServerConfig,
        process: EngineProcess,
        on_message: Callable[[FromEngine], None],
        on_death: Callable[[str], None],
    ) -> None:
        self.health = config.health
        self.process = process
        self.stats = EngineStats()
        self.heartbeat: Heartbeat | None = None
        self.dead: str | None = None  # the reason
        self._on_message = on_message
        self._on_death = on_death
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._plain: Context = zmq.Context.shadow(self._context.underlying)
        self._send_socket: zmq.Socket[bytes]
        self._receive_socket: zmq.asyncio.Socket
        self._watchdog = Watchdog("the engine", config.health, time.monotonic())
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._send_socket = connect_sender(self._plain, self.process.input_address, linger_ms=0)
        self._receive_socket = bind_receiver(self._context, self.process.output_address)
        self._watchdog = Watchdog("the engine", self.health, time.monotonic())
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._watch()),
        ]

    def send(self, message: ToEngine) -> None:
        """Send without blocking; admission bounds the queue. Raises EngineDeadError."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        try:
            self._send_socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError("the engine process is not connected") from None

    @property
    def problem(self) -> str | None:
        """Why the engine is unhealthy; None if it is healthy."""
        if self.dead is not None:
            return self.dead
        return self._watchdog.problem()

    async def close(self) -> None:
        """Shut the engine down, kill it after CLOSE_GRACE, and remove its sockets."""
        self._closing = True
        if self.dead is None and self._watchdog.is_ready:
            with contextlib.suppress(EngineDeadError):
                self.send(Shutdown())
            deadline = time.monotonic() + CLOSE_GRACE
            while self.process.popen.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:  # started
            self._send_socket.close(linger=0)
            self._receive_socket.close(linger=0)
        self._context.term()
        await asyncio.to_thread(self.process.remove)

    async def _receive(self) -> None:
        resumed = time.monotonic()
        while True:
            # recv() does not suspend while frames are queued. Handling them together lets streams
            # send more tokens per write, but blocks other tasks, hence MAX_DRAIN.
            if time.monotonic() - resumed > MAX_DRAIN:
                await asyncio.sleep(0)
                resumed = time.monotonic()
            frames: list[bytes] = [await self._receive_socket.recv()]
            with contextlib.suppress(zmq.Again):
                while len(frames) < MAX_JOINED:
                    frames.append(await self._receive_socket.recv(zmq.NOBLOCK))
            found = [decode_or_none(decode_from_engine, frame) for frame in frames]
            for message in join_outputs(message for message in found if message is not None):
                self._handle(message)

    def _handle(self, message: FromEngine) -> None:
        beat = message if isinstance(message, Heartbeat) else None
        self._watchdog.record_message(beat.loop_age if beat is not None else None)
        if beat is not None:
            self.heartbeat = beat
            self.stats = beat.stats or self.stats
            return
        if isinstance(message, Outputs):
            self.stats = message.stats
        elif isinstance(message, Ready):
            self._watchdog.is_ready = True
            self.stats = EngineStats.at_start(message.info)
        try:
            if isinstance(message, Failed):
                self.declare_dead(f"the engine failed: {message.error}", logged=True)
            else:
                self._on_message(message)
        except BaseException as error:
            if not is_fault(error):
                raise
            logger.error(
                "a message from the engine could not be handled; its requests: %s",
                message.request_ids if isinstance(message, Outputs | Rejected) else [],
                exc_info=error,
            )
            self.declare_dead(f"a message from the engine could not be handled: {error}")

    async def _watch(self) -> None:
        while self.dead is None:
            await asyncio.sleep(TICK)
            self._watchdog.tick(time.monotonic())
            status = self.process.popen.poll()
            if self._closing:
                continue
            if status is not None:
                await asyncio.sleep(0.05)  # its last message may still be in the socket
            reason = self._watchdog.failure(status)
            if reason is not None:
                self.declare_dead(reason, logged=status == EXIT_FAILED)

    def declare_dead(self, reason: str, logged: bool = False) -> None:
        """Kill the engine and fail its requests. `logged`: the engine logged the reason itself."""
        if self.dead is not None or self._closing:
            return
        self.dead = reason
        if not logged:
            log_event(logger, logging.ERROR, "the engine is dead", reason=reason)
        with contextlib.suppress(ProcessLookupError):
            self.process.popen.kill()
        self._on_death(reason)
