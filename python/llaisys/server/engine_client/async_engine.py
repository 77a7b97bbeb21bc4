"""AsyncLLMEngine: tokenization and detokenization in the API process, one queue per request.

    submit -> stream (deltas; the last one has `output`); cancel at any time

`stream` may be entered once; leaving it early cancels the request. When the engine dies, every open
request ends with one `EngineDeadError`.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llaisys.chat.style import ChatStyle
from llaisys.common.errors import InvalidInputError, LlaisysError
from llaisys.common.request import RequestStatus
from llaisys.common.sampling import SamplingParams, sampling_defaults
from llaisys.common.types import ModelInfo, StreamOutput, TokenUpdate
from llaisys.engine.input_processor import InputProcessor, open_tokenizer
from llaisys.engine.output_processor import DEFAULT_OUTPUT_OPTIONS, OutputOptions, OutputProcessor
from llaisys.server.config import ServerConfig
from llaisys.server.engine_client.deltas import merge_deltas
from llaisys.server.engine_client.link import EngineLink
from llaisys.server.engine_client.lora_table import LoraEntry
from llaisys.server.engine_client.messages import (
    EngineStats,
    Finish,
    FromEngine,
    Load,
    LoadLora,
    LoraChanged,
    MemoryEstimate,
    Outputs,
    Ready,
    Rejected,
    Submit,
    UnloadLora,
)
from llaisys.server.engine_client.replicas.replica import Replica
from llaisys.server.engine_client.replicas.replica_set import ReplicaSet
from llaisys.server.engine_client.start import EngineProcess
from llaisys.server.engine_client.text_work import INLINE_CHARS, TextWork
from llaisys.server.errors import (
    EngineDeadError,
    EngineNotReadyError,
    QueueTimeoutError,
    RejectedError,
    UnknownRequestError,
)

logger = logging.getLogger("llaisys.server")

ABORTED = RequestStatus.FINISHED_ABORTED
MAX_SINK_SECONDS = 0.005  # of consecutive work in sinks
# Takes a delta, or returns False and leaves it to `stream`.
Sink = Callable[[StreamOutput], bool]


@dataclass(slots=True)
class _OpenRequest:
    """A request between `submit` and the end of its stream."""

    request_id: str
    names: list[str]  # engine request ids of its choices
    is_streaming: bool = False
    is_waiting: bool = False  # its stream waits, and the reader has handled all earlier deltas
    sink: Sink | None = None
    deltas: deque[StreamOutput] = field(default_factory=deque)  # not fetched yet
    error: LlaisysError | None = None
    ended: bool = False  # the engine sends no more updates
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class AsyncLLMEngine:
    """Not thread-safe: all methods are called on one event loop."""

    def __init__(self, config: ServerConfig, process: EngineProcess | None = None) -> None:
        self.config = config
        self.model_info: ModelInfo | None = None
        self.tokenizer: Any = None
        self.memory_estimate: MemoryEstimate | None = None  # of an engine with `wait_for_memory`
        self.estimated = asyncio.Event()  # `memory_estimate` is set, or the engine is dead
        self.style = ChatStyle()  # set when the model is loaded
        self.ready = asyncio.Event()  # loaded or dead
        self.on_death: list[Callable[[str], None]] = []
        link = EngineLink if config.data_parallel_size == 1 else ReplicaSet
        self._link: EngineLink | ReplicaSet = link(
            config, process or EngineProcess(config), self._on_message, self._on_death
        )
        self._inputs: InputProcessor | None = None
        self._outputs = OutputProcessor()
        self._requests: dict[str, _OpenRequest] = {}
        self._token_counters: dict[str, Callable[[int], None]] = {}  # by engine request id
        self._unwritten: dict[str, _OpenRequest] = {}  # with deltas for their sinks
        self._names_taken: set[str] = set()  # by requests in preparation
        self._counter = itertools.count()
        self._lora_serials = itertools.count(1)
        self._lora_changes: dict[int, asyncio.Future[None]] = {}  # by serial
        self._opening: asyncio.Task[None] | None = None
        self.texts = TextWork()

    async def start(self) -> None:
        """Start to receive messages; `ready` is set when the model is loaded."""
        self._link.start()

    def load(self) -> None:
        """Let an engine with `wait_for_memory` load its model."""
        self._link.send(Load())

    async def close(self) -> None:
        """End the engine process; requests that are still open end with EngineDeadError."""
        self._fail_all("the server has shut down")
        self.texts.close()
        await self._link.close()
        # Free the tokenizer now rather than in the next garbage collection: this object and its
        # link form a reference cycle.
        self.tokenizer = self._inputs = self.model_info = None
        self._outputs = OutputProcessor()
        self.on_death.clear()

    # ---- state ---------------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        return self._link.problem

    @property
    def dead(self) -> str | None:
        return self._link.dead

    @property
    def is_ready(self) -> bool:
        return self._inputs is not None and self._link.dead is None

    @property
    def loading(self) -> tuple[str, int, int] | None:
        """(stage, done, total) while the model loads, else None."""
        beat = self._link.heartbeat
        return None if beat is None or self.is_ready else beat.loading

    @property
    def replicas(self) -> list[Replica]:
        """The replicas; empty without data parallelism."""
        return self._link.replicas if isinstance(self._link, ReplicaSet) else []

    @property
    def degraded(self) -> list[int]:
        return self._link.degraded if isinstance(self._link, ReplicaSet) else []

    def debug_state(self) -> dict[str, int]:
        """Counts of what open requests hold; 0 without one."""
        return {"requests": len(self._requests), "choices": self._outputs.num_choices}

    @property
    def stats(self) -> EngineStats:
        return self._link.stats

    @property
    def usage(self) -> tuple[float, int]:
        """(CPU seconds, resident bytes) of the engine process."""
        beat = self._link.heartbeat
        return (0.0, 0) if beat is None else (beat.cpu_seconds, beat.rss_bytes)

    @property
    def inputs(self) -> InputProcessor:
        if self._link.dead is not None:
            raise EngineDeadError(self._link.dead)
        if self._inputs is None:
            raise EngineNotReadyError("the model is still being loaded")
        return self._inputs

    # ---- tokenization --------------------------------------------------------------------------

    async def encode(self, text: str) -> list[int]:
        return await self.texts.run(len(text), self.require_tokenizer().encode, text)

    def require_tokenizer(self) -> Any:
        if self.inputs.tokenizer is None:
            raise InvalidInputError("text needs a tokenizer; this model has none", field="text")
        return self.inputs.tokenizer

    # ---- requests ------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        owner: str = "",
        stream: bool = False,
        cache_salt: str | None = None,
        on_tokens: Callable[[int], None] | None = None,
        reading: OutputOptions = DEFAULT_OUTPUT_OPTIONS,
        lora: str | None = None,
    ) -> str:
        """Send a prompt to the engine and return its engine request id: the client's request id,
        made unique. Raises InvalidInputError for invalid input; `stream` raises RejectedError when
        the engine rejects the request.

        Scheduling is fair between owners, and between the request ids of one owner. Unless the
        prefix cache is shared, only the same `owner` reuses a prefix. `on_tokens` is called with
        the number of generated tokens of every step until the request ends, read or not.
        """
        inputs = self.inputs
        token_ids = await self.encode(prompt) if isinstance(prompt, str) else prompt
        name = self._unique_name(request_id)
        size = len(token_ids)
        if params is not None:  # bad words and sequence breakers are tokenised too
            texts = params.bad_words or params.dry_multiplier
            size += INLINE_CHARS if texts else len(params.allowed_token_ids or ())
        self._names_taken.add(name)
        try:
            entry = await self.texts.run(
                size, inputs.process, token_ids, params, name, cache_salt, lora
            )
        finally:
            self._names_taken.discard(name)
        for request in entry.requests:
            request.owner, request.job = owner, request_id or name
            request.reports_progress = stream and reading.progress and request.choice == 0
            if self.config.has_private_prefixes:
                request.cache_salt = f"{owner}:{request.cache_salt}"
        timeout = self.config.limits.queue_timeout or None
        self._link.send(Submit.of(entry.request_id, entry.requests, timeout))
        self._outputs.add(entry.request_id, None, entry.params, entry.requests, stream, reading)
        names = [request.request_id for request in entry.requests]
        if on_tokens is not None:
            self._token_counters.update(dict.fromkeys(names, on_tokens))
        self._requests[entry.request_id] = _OpenRequest(entry.request_id, names)
        return entry.request_id

    def _unique_name(self, request_id: str) -> str:
        """Return an unused id: clients may send an id twice, or one that looks generated."""
        taken = request_id in self._requests or request_id in self._names_taken
        if request_id and not taken and not set(request_id) & set("#~"):
            return request_id
        return f"{request_id}~{next(self._counter)}"

    async def stream(self, request_id: str) -> AsyncIterator[StreamOutput]:
        """Yield the deltas of a request; the last one has the whole output. Deltas that were not
        fetched in time are merged. Leaving the iterator early cancels the request."""
        request = self._requests.get(request_id)
        if request is None or request.is_streaming:
            stage = "gone" if request is None else "streaming"
            logger.error("request %s: stream while %s", request_id, stage)
            raise UnknownRequestError(f"request {request_id} cannot be read: it is {stage}")
        request.is_streaming = True
        try:
            while True:
                while request.deltas:
                    delta = merge_deltas(request.deltas)
                    yield delta
                    if delta.output is not None:
                        return
                    if len(delta.token_ids) > 1:  # a slow reader: yield to other tasks
                        await asyncio.sleep(0)
                if request.error is not None:
                    raise request.error
                request.wake.clear()
                request.is_waiting = True
                await request.wake.wait()
                request.is_waiting = False
        finally:
            self._requests.pop(request_id, None)
            if not request.ended:
                self._abort(request)

    def set_sink(self, request_id: str, sink: Sink) -> None:
        """Call `sink` with each delta that arrives while `stream` waits, without waking its task.
        The last delta, and those that the sink does not take, are yielded by `stream`."""
        request = self._requests.get(request_id)
        if request is not None:
            request.sink = sink

    async def cancel(self, request_id: str) -> bool:
        """End a request; its stream finishes with reason `abort`. False if it had already ended."""
        request = self._requests.get(request_id)
        if request is None or request.ended:
            return False
        self._abort(request)
        return True

    def discard(self, request_id: str) -> None:
        """Cancel a request whose stream will not be read."""
        request = self._requests.pop(request_id, None)
        if request is not None and not request.is_streaming and not request.ended:
            self._abort(request)

    def _abort(self, request: _OpenRequest) -> None:
        if self._link.dead is None:
            try:
                self._link.send(Finish(request.names))
            except EngineDeadError:
                logger.warning("request %s: the engine is gone", request.request_id)

    # ---- LoRA adapters -------------------------------------------------------------------------

    async def load_lora(self, name: str, path: str, in_place: bool = False) -> None:
        """Load an adapter on every replica. Raises RejectedError with the reason."""
        serial = next(self._lora_serials)
        await self._change_lora(LoadLora(serial, name, path, in_place))

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter; its requests continue. Raises RejectedError if it is unknown."""
        await self._change_lora(UnloadLora(next(self._lora_serials), name))

    def restore_loras(self, gone: Sequence[str], new: Sequence[LoraEntry]) -> None:
        """Repeat the run-time changes on an engine that was started from the configuration."""
        for name in gone:
            self._link.send(UnloadLora(next(self._lora_serials), name))
        for entry in new:
            serial = next(self._lora_serials)
            self._link.send(LoadLora(serial, entry.name, entry.path, in_place=True))

    async def _change_lora(self, message: LoadLora | UnloadLora) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lora_changes[message.serial] = done
        try:
            self._link.send(message)
            await done
        finally:
            del self._lora_changes[message.serial]

    def _on_lora_changed(self, message: LoraChanged) -> None:
        done = self._lora_changes.get(message.serial)
        if done is None or done.done():
            if message.error is not None:
                logger.error("a LoRA adapter was not restored: %s", message.error)
        elif message.error is None:
            done.set_result(None)
        else:
            fault = RejectedError(message.error, field=message.field, code=message.code)
            done.set_exception(fault)

    # ---- messages from the engine --------------------------------------------------------------

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._on_outputs(message)
        elif isinstance(message, Rejected):
            ends = [TokenUpdate(name, [], ABORTED) for name in message.request_ids]
            self._outputs.process(ends)  # removes their state
            for name in message.request_ids:
                self._token_counters.pop(name, None)
            request = self._requests.get(message.group)
            if request is not None:
                text = message.error
                fault: LlaisysError = QueueTimeoutError(text)
                if not message.timed_out:
                    fault = RejectedError(text, field=message.field, code=message.code)
                self._end(request, fault)
        elif isinstance(message, LoraChanged):
            self._on_lora_changed(message)
        elif isinstance(message, MemoryEstimate):
            self.memory_estimate = message
            self.estimated.set()
        elif isinstance(message, Ready):
            self._opening = asyncio.create_task(self._open(message))

    def _on_outputs(self, message: Outputs) -> None:
        updates = message.updates
        counts: dict[Callable[[int], None], int] = {}  # one key has many streams
        for update in updates:
            done = update.status.finished
            find = self._token_counters.pop if done else self._token_counters.get
            count = find(update.request_id, None)
            if count is not None and update.token_ids:
                counts[count] = counts.get(count, 0) + len(update.token_ids)
        for count, tokens in counts.items():
            count(tokens)
        deltas, stopped = self._outputs.process(updates)
        if stopped:
            self._link.send(Finish(stopped, stopped=True))  # has no reply
            for name in stopped:
                self._token_counters.pop(name, None)
        is_scheduled = bool(self._unwritten)
        for delta in deltas:
            request = self._requests.get(delta.request_id)
            if request is None:
                continue
            request.deltas.append(delta)
            request.ended = delta.output is not None
            if request.is_waiting and request.sink is not None:
                self._unwritten[request.request_id] = request
            else:
                request.wake.set()
        if not is_scheduled:
            self._write_deltas()

    def _write_deltas(self) -> None:
        """Give deltas to the sinks of their requests, and the others to `stream`. After
        MAX_SINK_SECONDS the other tasks run first, while deltas of the same request are merged."""
        until = time.monotonic() + MAX_SINK_SECONDS
        while self._unwritten:
            if time.monotonic() > until:
                asyncio.get_running_loop().call_soon(self._write_deltas)
                return
            request = self._unwritten.pop(next(iter(self._unwritten)))
            while request.deltas and request.is_waiting and request.sink is not None:
                delta = merge_deltas(request.deltas)
                if delta.output is not None or not request.sink(delta):
                    request.deltas.appendleft(delta)
                    request.wake.set()
                    break

    async def _open(self, message: Ready) -> None:
        info = message.model_info()
        try:
            engine = self.config.engine
            tokenizer = await asyncio.to_thread(
                open_tokenizer, info, engine.tokenizer, engine.chat_template
            )
            defaults = sampling_defaults(info.generation_defaults, self.config.sampling)
            self._inputs = InputProcessor(
                info, tokenizer, defaults=defaults, default_seed=engine.seed
            )
        except Exception as error:
            logger.exception("the tokenizer cannot be opened")
            self._link.declare_dead(f"the tokenizer cannot be opened: {error}")
            return
        self.model_info, self.tokenizer = info, tokenizer
        self.style = ChatStyle.of(
            tokenizer, self.config.tool_call_parser, self.config.reasoning_parser
        )
        if self.style.markers is not None:
            self._inputs.reasoning_markers = (self.style.markers.start, self.style.markers.end)
        self._outputs = OutputProcessor(tokenizer, self._inputs.eos_token_ids)
        self.ready.set()

    def _on_death(self, reason: str) -> None:
        self._fail_all(reason)
        self.estimated.set()
        self.ready.set()
        for callback in self.on_death:
            callback(reason)

    def _fail_all(self, reason: str) -> None:
        self._token_counters.clear()
        for change in self._lora_changes.values():
            if not change.done():
                change.set_exception(EngineDeadError(reason))
        for request in list(self._requests.values()):
            if not request.ended:
                self._end(request, EngineDeadError(reason))

    def _end(self, request: _OpenRequest, error: LlaisysError) -> None:
        request.error = error
        request.ended = True
        request.wake.set()
