"""The engine process: an unchanged EngineCore in a tight loop between two ipc sockets.

    python -m llaisys.server.engine_client.process      (started by `start`, never by hand)

Three threads: the loop (main), the heartbeat, and the one that watches standard input.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import replace

import zmq

from llaisys.common.errors import InvalidInputError, LlaisysError
from llaisys.common.numa import bind_to_cores
from llaisys.common.progress import progress_listener
from llaisys.common.request import RequestStatus
from llaisys.common.types import GpuUsage, TokenUpdate
from llaisys.engine.config import EngineConfig
from llaisys.engine.core import EngineCore
from llaisys.engine.executor import Executor, estimate_memory
from llaisys.processes.channel import (
    Context,
    bind_receiver,
    connect_sender,
    decode_or_none,
    encode,
)
from llaisys.processes.child import EXIT_FAILED
from llaisys.processes.heartbeat import HeartbeatSender, LoopClock, cpu_seconds, resident_bytes
from llaisys.processes.startup import init_child
from llaisys.server.engine_client.messages import (
    EngineSetup,
    EngineStats,
    Failed,
    Finish,
    Heartbeat,
    Load,
    Needs,
    Outputs,
    Ready,
    Rejected,
    Shutdown,
    Submit,
    Update,
    decode_to_engine,
)

logger = logging.getLogger("llaisys.engine_process")

IDLE_WAIT_MS = 1000
HELD_WAIT_MS = 1  # when all requests wait for their grammars
PROFILE_SECONDS = 0.5  # how often the worker is asked for its times
LAST_WORDS_MS = 10_000  # for a parent that is still starting; when it is gone, so is this process


class NotWanted(Exception):
    """The engine was told to end before it loaded its model."""


class EngineClock(LoopClock):
    """What the heartbeat tells: how far the model is, then when the loop last turned."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: EngineStats | None = None
        self.loading: tuple[str, int, int] | None = None

    def load(self, stage: str, done: int, total: int) -> None:
        """Hears how far the model is."""
        self.loading = (stage, done, total)

    def heartbeat(self) -> bytes:
        message = Heartbeat(self.age, cpu_seconds(), resident_bytes(), self.stats, self.loading)
        return encode(message)


class EngineLoop:
    """Takes messages, steps the core, sends what came out. Owns nothing but its bookkeeping."""

    def __init__(
        self,
        core: EngineCore,
        inputs: zmq.Socket[bytes],
        outputs: zmq.Socket[bytes],
        clock: EngineClock,
        max_failed_steps: int,
        clock_ahead: float = 0.0,
    ) -> None:
        self.core = core
        self.inputs = inputs
        self.outputs = outputs
        self.clock = clock
        self.max_failed_steps = max_failed_steps
        self.clock_ahead = clock_ahead  # of the server's
        self._closing = False
        self._profiled = 0.0  # when the worker was last asked
        self._stage_seconds: dict[str, float] = {}
        self._draws: dict[str, int] = {}
        self._gpus: list[GpuUsage] = []

    def run(self) -> None:
        """Until `Shutdown`. Raises when the engine cannot go on."""
        while not self._closing:
            busy = self.core.has_unfinished()
            self.clock.tick(busy)
            wait = HELD_WAIT_MS if busy else IDLE_WAIT_MS
            updates = self._take_messages(0 if self.core.can_step else wait)
            updates += self._reject_failed_grammars()
            self._expire()
            if self.core.can_step:
                self.clock.tick(True)
                updates += self.core.step()
            self.clock.stats = stats = self._stats()
            if updates:
                message = Outputs(
                    [Update.of(update, self.clock_ahead) for update in updates], stats
                )
                self.outputs.send(encode(message))
            self._check_faults()

    def _take_messages(self, wait_ms: int) -> list[TokenUpdate]:
        """Everything that has arrived; waits for the first when there is nothing else to do."""
        updates: list[TokenUpdate] = []
        if wait_ms and not self.inputs.poll(wait_ms):
            return updates
        while True:
            try:
                frame = self.inputs.recv(zmq.NOBLOCK)
            except zmq.Again:
                return updates
            message = decode_or_none(decode_to_engine, frame)
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Finish):
                updates += self._finish(message)
            elif isinstance(message, Shutdown):
                self._closing = True

    def _submit(self, message: Submit) -> None:
        message.arrival_time += self.clock_ahead
        deadline = None
        if message.queue_timeout is not None:
            deadline = message.arrival_time + message.queue_timeout
        try:
            self.core.add_requests(message.requests(), deadline)
        except InvalidInputError as error:
            self._reject(message.group, message.request_ids, error)

    def _reject(self, group: str, request_ids: list[str], error: InvalidInputError) -> None:
        rejected = Rejected(group, request_ids, str(error), error.field, error.code)
        self.outputs.send(encode(rejected))

    def _reject_failed_grammars(self) -> list[TokenUpdate]:
        """Requests whose grammars cannot be used are refused; the engine's own faults end them."""
        ended = []
        for requests, error in self.core.poll():
            if isinstance(error, InvalidInputError):
                self._reject(requests[0].group, [r.request_id for r in requests], error)
            else:
                fault = RequestStatus.FINISHED_ERROR
                ended += [TokenUpdate(r.request_id, [], fault, error=str(error)) for r in requests]
        return ended

    def _finish(self, message: Finish) -> list[TokenUpdate]:
        status = RequestStatus.FINISHED_ABORTED
        if message.stopped:
            status = RequestStatus.FINISHED_STOPPED
        found = [self.core.finish_request(name, status) for name in message.request_ids]
        return [] if message.stopped else [update for update in found if update is not None]

    def _expire(self) -> None:
        for requests in self.core.expire():
            names = [request.request_id for request in requests]
            error = "waited too long in the queue"
            self.outputs.send(encode(Rejected(requests[0].group, names, error, timed_out=True)))

    def _check_faults(self) -> None:
        """A step that raised has ended its requests; after too many in a row nothing here can be
        trusted any more."""
        failed = self.core.failed_steps
        if failed >= self.max_failed_steps:
            raise RuntimeError(f"{failed} steps in a row failed in the worker")

    def _stats(self) -> EngineStats:
        now = time.monotonic()
        if now - self._profiled > PROFILE_SECONDS and not self.core.failed_steps:
            self._profiled = now
            profile = self.core.executor.profile()
            self._stage_seconds, self._draws = profile["stages"], profile["draws"]
            self._gpus = self.core.executor.gpu_usage()
        kept = {"stage_seconds": self._stage_seconds, "draws": self._draws, "gpus": self._gpus}
        stats = {**self.core.stats(), **kept}
        return EngineStats(*[stats[name] for name in EngineStats.__struct_fields__])


def ask_for_room(
    config: EngineConfig, inputs: zmq.Socket[bytes], outputs: zmq.Socket[bytes]
) -> EngineConfig:
    """Say what the model will take, and wait until there is room. With the number of KV blocks that
    was told: what is available may change meanwhile."""
    estimate = estimate_memory(config)
    fixed = resident_bytes() + estimate.scratch
    outputs.send(encode(Needs(estimate.weights, estimate.kv_cache, fixed)))
    while True:
        message = decode_or_none(decode_to_engine, inputs.recv())
        if isinstance(message, Load):
            cache = replace(config.cache, num_kv_blocks=estimate.num_kv_blocks)
            return replace(config, cache=cache)
        if isinstance(message, Shutdown):
            raise NotWanted


def serve_engine(setup: EngineSetup) -> int:
    """Load, announce, loop, close; the exit status."""
    context: Context = zmq.Context()
    outputs = connect_sender(context, setup.output_address, LAST_WORDS_MS)
    inputs = bind_receiver(context, setup.input_address)
    clock = EngineClock()
    heartbeats = HeartbeatSender(
        context, setup.output_address, setup.heartbeat_interval, clock.heartbeat
    )
    core = None
    try:
        config = setup.engine_config()
        if config.parallel.numa and setup.replicas > 1:
            bind_to_cores(setup.replica, setup.replicas)  # its ranks divide that among them
        with progress_listener(clock.load):
            if setup.ask_first:
                config = ask_for_room(config, inputs, outputs)
            core = EngineCore(config, Executor.get_class(config)(config))
        clock.loading = None
        clock.stats = EngineStats.at_start(core.model_info)
        outputs.send(encode(Ready.of(core.model_info)))
        ahead = setup.clock_ahead
        EngineLoop(core, inputs, outputs, clock, setup.max_failed_steps, ahead).run()
        status = 0
    except NotWanted:
        status = 0
    except Exception as error:
        expected = core is None and isinstance(error, LlaisysError)  # a model that is not there
        logger.error("the engine cannot go on: %s", error, exc_info=None if expected else error)
        outputs.send(encode(Failed(f"{type(error).__name__}: {error}")))
        status = EXIT_FAILED
    finally:
        heartbeats.stop()
        inputs.close(linger=0)
        outputs.close()
        context.term()
        if core is not None:
            core.close()
    return status


def main() -> int:
    setup = init_child(EngineSetup)
    status = serve_engine(setup)
    logging.shutdown()
    # The watcher holds standard input: a normal exit would wait for its lock.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
