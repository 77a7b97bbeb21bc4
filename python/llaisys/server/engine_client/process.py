"""The engine process: an EngineCore in a loop between two ipc sockets.

    python -m llaisys.server.engine_client.process      (internal; `start` runs it)

Three threads: the loop (main), the heartbeat, and the watcher of standard input.
"""

import gc
import logging
import os
import sys
import time
from dataclasses import dataclass, field, replace

import zmq

from llaisys.common.errors import InvalidInputError, LlaisysError
from llaisys.common.machine_limits import resident_bytes
from llaisys.common.numa import bind_to_cores
from llaisys.common.progress import progress_listener
from llaisys.common.request import RequestStatus
from llaisys.common.types import GpuUsage, TokenUpdate
from llaisys.engine.config import EngineConfig
from llaisys.engine.core import EngineCore
from llaisys.engine.executor import Executor, estimate_memory
from llaisys.engine.executor.device_choice import resolve_device
from llaisys.processes.channel import Context, bind_receiver, connect_sender, decode_or_none, encode
from llaisys.processes.child import EXIT_FAILED
from llaisys.processes.heartbeat import HeartbeatSender, LoopClock, cpu_seconds
from llaisys.processes.startup import init_child
from llaisys.server.engine_client.messages import (
    EngineSetup,
    EngineStats,
    Failed,
    Finish,
    Heartbeat,
    Load,
    LoadLora,
    LoraChanged,
    MemoryEstimate,
    Outputs,
    Ready,
    Rejected,
    Shutdown,
    Submit,
    UnloadLora,
    decode_to_engine,
)

logger = logging.getLogger("llaisys.engine_process")

IDLE_WAIT_MS = 1000
MAX_STEP_TIME = 0.25  # seconds: what a stream may wait for the prompts of others
GRAMMAR_WAIT_MS = 1  # while all requests wait for grammar compilation
PROFILE_SECONDS = 0.5  # interval of worker profile reads
FINAL_LINGER_MS = 10_000  # lets a parent that is still starting receive the last message


class ShutdownBeforeLoad(Exception):
    """`Shutdown` arrived before the model was loaded."""


class EngineClock(LoopClock):
    """Content of heartbeats: load progress, then the age of the last loop iteration and stats."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: EngineStats | None = None
        self.loading: tuple[str, int, int] | None = None

    def load(self, stage: str, done: int, total: int) -> None:
        """Record the load progress (a `common.progress` listener)."""
        self.loading = (stage, done, total)

    def heartbeat(self) -> bytes:
        message = Heartbeat(self.age, cpu_seconds(), resident_bytes(), self.stats, self.loading)
        return encode(message)


@dataclass(slots=True)
class EngineLoop:
    """Receives messages, steps the core and sends the updates. Borrows the core and sockets."""

    core: EngineCore
    inputs: zmq.Socket[bytes]
    outputs: zmq.Socket[bytes]
    clock: EngineClock
    max_failed_steps: int
    clock_offset: float = 0.0  # see EngineSetup
    _closing: bool = False
    _lora_serials: dict[int, int] = field(default_factory=dict)  # of `LoadLora`, by adapter id
    _profiled: float = 0.0  # time of the last profile read
    _stage_seconds: dict[str, float] = field(default_factory=dict)
    _sample_counts: dict[str, int] = field(default_factory=dict)
    _gpus: list[GpuUsage] = field(default_factory=list)

    def run(self) -> None:
        """Run until `Shutdown`. Raises when the engine has failed."""
        while not self._closing:
            busy = self.core.has_unfinished()
            self.clock.tick(busy)
            wait = GRAMMAR_WAIT_MS if busy else IDLE_WAIT_MS
            updates = self._take_messages(0 if self.core.can_step else wait)
            updates += self._reject_pending()
            self._report_loras()
            self._expire()
            if self.core.can_step:
                self.clock.tick(True)
                updates += self.core.step()
            self.clock.stats = stats = self._stats()
            if updates:
                self._send_updates(updates, stats)
            failed = self.core.failed_steps  # consecutive; their requests have ended
            if failed >= self.max_failed_steps:
                raise RuntimeError(f"{failed} consecutive steps failed in the worker")

    def _send_updates(self, updates: list[TokenUpdate], stats: EngineStats) -> None:
        if self.clock_offset:
            for update in updates:
                if update.scheduled_time is not None:
                    update.scheduled_time -= self.clock_offset
        self.outputs.send(encode(Outputs(updates, stats)))

    def _take_messages(self, wait_ms: int) -> list[TokenUpdate]:
        """Handle all messages that have arrived; wait up to `wait_ms` for the first."""
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
            elif isinstance(message, LoadLora | UnloadLora):
                self._change_lora(message)
            elif isinstance(message, Shutdown):
                self._closing = True

    def _change_lora(self, message: LoadLora | UnloadLora) -> None:
        try:
            if isinstance(message, LoadLora):
                lora_id = self.core.loras.load(message.name, message.path, message.in_place)
                self._lora_serials[lora_id] = message.serial
            else:
                self.core.loras.unload(message.name)
                self._reply_lora(message.serial)
        except InvalidInputError as error:
            self._reply_lora(message.serial, error)

    def _report_loras(self) -> None:
        """Reply to the loads that have ended."""
        for result in self.core.loras.finished_loads():
            error = result.error
            if error is not None:
                logger.error("LoRA adapter %s is not loaded: %s", result.name, error)
                text = f"the LoRA adapter cannot be loaded: {error}"
                error = InvalidInputError(text, field="lora_path", code="lora_load_failed")
            self._reply_lora(self._lora_serials.pop(result.lora_id, 0), error)

    def _reply_lora(self, serial: int, error: InvalidInputError | None = None) -> None:
        reply = LoraChanged(serial)
        if error is not None:
            reply = LoraChanged(serial, str(error), error.field, error.code)
        self.outputs.send(encode(reply))

    def _submit(self, message: Submit) -> None:
        message.arrival_time += self.clock_offset
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

    def _reject_pending(self) -> list[TokenUpdate]:
        """Reject requests with invalid grammars or unreadable adapters; end those whose grammar
        failed internally."""
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

    def _stats(self) -> EngineStats:
        now = time.monotonic()
        if now - self._profiled > PROFILE_SECONDS and not self.core.failed_steps:
            self._profiled = now
            profile = self.core.executor.profile()
            self._stage_seconds, self._sample_counts = profile["stages"], profile["sample_counts"]
            self._gpus = self.core.executor.gpu_usage()
        profile_stats = {
            "stage_seconds": self._stage_seconds,
            "sample_counts": self._sample_counts,
            "gpus": self._gpus,
        }
        stats = {**self.core.stats(), **profile_stats}
        return EngineStats(*[stats[name] for name in EngineStats.__struct_fields__])


def reserve_memory(
    config: EngineConfig, inputs: zmq.Socket[bytes], outputs: zmq.Socket[bytes]
) -> EngineConfig:
    """Send the memory estimate and wait for `Load`. Returns the configuration with the estimated
    number of KV blocks fixed, because available memory may change in the meantime."""
    estimate = estimate_memory(config)
    fixed = resident_bytes() + estimate.scratch
    outputs.send(encode(MemoryEstimate(estimate.weights, estimate.kv_cache, fixed)))
    while True:
        message = decode_or_none(decode_to_engine, inputs.recv())
        if isinstance(message, Load):
            cache = replace(config.cache, num_kv_blocks=estimate.num_kv_blocks)
            return replace(config, cache=cache)
        if isinstance(message, Shutdown):
            raise ShutdownBeforeLoad


def engine_config_of(setup: EngineSetup) -> EngineConfig:
    """Return the configuration with the device of this process and a server's step time."""
    several = "several models share the memory" if setup.wait_for_memory else ""
    config = resolve_device(setup.engine_config(), setup.replica, setup.replicas, several)
    if config.scheduler.max_step_time is None:
        scheduler = replace(config.scheduler, max_step_time=MAX_STEP_TIME)
        config = replace(config, scheduler=scheduler)
    return config


def start_kv_transfer(core: EngineCore, setup: EngineSetup) -> str:
    """Return the address where other engines fetch KV blocks; empty: the transfer is off."""
    transport = core.config.cache.kv_transfer
    if transport == "off" or not setup.kv_token:
        return ""
    address = (
        f"tcp:{setup.kv_host}:0" if transport == "tcp" else f"unix:{setup.socket_directory}/kv"
    )
    return core.start_kv_transfer(address, bytes.fromhex(setup.kv_token))


def serve_engine(setup: EngineSetup) -> int:
    """Load the model, run the loop, close; return the exit status."""
    context: Context = zmq.Context()
    try:
        outputs = connect_sender(context, setup.output_address, FINAL_LINGER_MS)
        inputs = bind_receiver(context, setup.input_address)
    except zmq.ZMQError as error:  # the server has ended and removed the folder of its sockets
        logger.error("the engine's sockets cannot be opened: %s", error)
        return EXIT_FAILED
    clock = EngineClock()
    heartbeats = HeartbeatSender(
        context, setup.output_address, setup.heartbeat_interval, clock.heartbeat
    )
    core = None
    try:
        config = engine_config_of(setup)
        if config.parallel.numa and setup.replicas > 1:
            bind_to_cores(setup.replica, setup.replicas)  # its ranks share those CPUs
        with progress_listener(clock.load):
            if setup.wait_for_memory:
                config = reserve_memory(config, inputs, outputs)
            core = EngineCore(config, Executor.get_class(config)(config))
        # Permanent objects are not collected again: a full collection holds the GIL, and on a busy
        # machine the heartbeat would be late.
        gc.collect()
        gc.freeze()
        clock.loading = None
        clock.stats = EngineStats.at_start(core.model_info)
        outputs.send(encode(Ready.of(core.model_info, start_kv_transfer(core, setup))))
        offset = setup.clock_offset
        EngineLoop(core, inputs, outputs, clock, setup.max_failed_steps, offset).run()
        status = 0
    except ShutdownBeforeLoad:
        status = 0
    except Exception as error:
        expected = core is None and isinstance(error, LlaisysError)  # such as a missing model
        logger.error("the engine failed: %s", error, exc_info=None if expected else error)
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
    # A normal exit would block on standard input, whose lock the watcher thread holds.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
