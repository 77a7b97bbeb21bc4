"""AsyncLLMEngine: the engine's text side in the API process, one queue per request.

    submit -> stream (parts until the last one has `output`) ; cancel at any time

Life of a request: OPEN -> STREAMING (somebody reads it) -> DONE. `stream` may be entered once;
whoever leaves it early cancels the request. When the engine dies every open request ends with
`EngineDeadError`, once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from llaisys.chat.style import ChatStyle
from llaisys.common.errors import InvalidInputError, LlaisysError
from llaisys.common.request import RequestStatus
from llaisys.common.sampling import SamplingParams, sampling_defaults
from llaisys.common.types import ModelInfo, StreamOutput, TokenUpdate
from llaisys.engine.input_processor import InputProcessor, open_tokenizer
from llaisys.engine.output_processor import DEFAULT_OUTPUT_OPTIONS, OutputOptions, OutputProcessor
from llaisys.server.config import ServerConfig
from llaisys.server.engine_client.link import EngineLink
from llaisys.server.engine_client.messages import (
    EngineStats,
    Finish,
    FromEngine,
    Load,
    Needs,
    Outputs,
    Ready,
    Rejected,
    Submit,
)
from llaisys.server.engine_client.parts import merge_parts
from llaisys.server.engine_client.start import EngineProcess
from llaisys.server.engine_client.text_work import INLINE_CHARS, TextWork
from llaisys.server.errors import (
    EngineDeadError,
    EngineNotReadyError,
    QueueTimeoutError,
    RejectedError,
    UnknownRequestError,
)
from llaisys.server.replicas.replica_set import Replica, ReplicaSet

logger = logging.getLogger("llaisys.server")

ABORTED = RequestStatus.FINISHED_ABORTED


class Stage(Enum):
    OPEN = "open"
    STREAMING = "streaming"
    DONE = "done"


@dataclass(slots=True)
class _OpenRequest:
    """A request between `submit` and the end of its stream."""

    request_id: str
    names: list[str]  # of its choices in the engine
    stage: Stage = Stage.OPEN
    parts: deque[StreamOutput] = field(default_factory=deque)  # not read yet
    error: LlaisysError | None = None
    ended: bool = False  # the engine will say no more
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class AsyncLLMEngine:
    """Lives on one event loop; no method may be called from another thread."""

    def __init__(self, config: ServerConfig, process: EngineProcess | None = None) -> None:
        self.config = config
        self.model_info: ModelInfo | None = None
        self.tokenizer: Any = None
        self.needs: Needs | None = None  # of an engine that asks first
        self.opened = asyncio.Event()  # `needs` is known, or it is dead
        self.style = ChatStyle()  # of the model's chats, once it is loaded
        self.ready = asyncio.Event()  # loaded, or dead
        self.on_death: list[Callable[[str], None]] = []
        link = EngineLink if config.data_parallel_size == 1 else ReplicaSet
        self._link: EngineLink | ReplicaSet = link(
            config, process or EngineProcess(config), self._on_message, self._on_death
        )
        self._inputs: InputProcessor | None = None
        self._outputs = OutputProcessor()
        self._requests: dict[str, _OpenRequest] = {}
        self._counting: dict[str, Callable[[int], None]] = {}  # by the choices' names in the engine
        self._names_taken: set[str] = set()  # by requests that are still being prepared
        self._counter = itertools.count()
        self._opening: asyncio.Task[None] | None = None
        self.texts = TextWork()

    async def start(self) -> None:
        """Begin to listen; `ready` is set when the model has been loaded."""
        self._link.start()

    def load(self) -> None:
        """To an engine that asked first: there is room for it."""
        self._link.send(Load())

    async def close(self) -> None:
        """End the engine process; requests that are still open end with EngineDeadError."""
        self._fail_all("the server has shut down")
        self.texts.close()
        await self._link.close()
        # The next engine of this model has its own: let go of the tokenizer and of what it was made
        # from now, not at the next collection of cycles (this object and its link are one).
        self.tokenizer = self._inputs = self.model_info = None
        self._outputs = OutputProcessor()
        self.on_death.clear()

    # ---- state ---------------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        """Why the engine is not healthy; None: it is."""
        return self._link.problem

    @property
    def dead(self) -> str | None:
        return self._link.dead

    @property
    def is_ready(self) -> bool:
        return self._inputs is not None and self._link.dead is None

    @property
    def loading(self) -> tuple[str, int, int] | None:
        """(stage, done, total) while the model is being loaded; None before and after."""
        beat = self._link.heartbeat
        return None if beat is None or self.is_ready else beat.loading

    @property
    def replicas(self) -> list[Replica]:
        """The engines, where there are several."""
        return self._link.replicas if isinstance(self._link, ReplicaSet) else []

    @property
    def degraded(self) -> list[int]:
        """The replicas that do not work although others do."""
        return self._link.degraded if isinstance(self._link, ReplicaSet) else []

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

    # ---- text to ids ---------------------------------------------------------------------------

    async def encode(self, text: str) -> list[int]:
        return await self.texts.run(len(text), self.tokenizer_or_refuse().encode, text)

    def tokenizer_or_refuse(self) -> Any:
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
    ) -> str:
        """Send a prompt to the engine and return its name there: the client's request id, made
        unique where need be. Raises InvalidInputError for what can be seen to be wrong here; the
        engine's own refusal (RejectedError) comes from `stream`.

        `owner` is whose request it is: owners have equal shares of a full engine, and so have the
        request ids of one owner. Unless the prefix cache is shared, a prefix is reused by its owner
        only. `on_tokens` hears how many tokens were generated, of every step until the engine has
        ended the request, whether anybody reads them or not.
        """
        inputs = self.inputs
        token_ids = await self.encode(prompt) if isinstance(prompt, str) else prompt
        name = self._unique_name(request_id)
        size = len(token_ids)
        if params is not None:  # bad words are texts to tokenise, too
            size += INLINE_CHARS if params.bad_words else len(params.allowed_token_ids or ())
        self._names_taken.add(name)
        try:
            entry = await self.texts.run(size, inputs.process, token_ids, params, name, cache_salt)
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
            self._counting.update(dict.fromkeys(names, on_tokens))
        self._requests[entry.request_id] = _OpenRequest(entry.request_id, names)
        return entry.request_id

    def _unique_name(self, request_id: str) -> str:
        """Clients may send one id twice, or one that looks like a name made here."""
        taken = request_id in self._requests or request_id in self._names_taken
        if request_id and not taken and not set(request_id) & set("#~"):
            return request_id
        return f"{request_id}~{next(self._counter)}"

    async def stream(self, request_id: str) -> AsyncIterator[StreamOutput]:
        """The parts of a request; the last one carries the whole output. Parts that were not
        fetched in time are put together. Leaving the iterator early cancels the request."""
        request = self._requests.get(request_id)
        if request is None or request.stage is not Stage.OPEN:
            stage = "gone" if request is None else request.stage.value
            logger.error("request %s: stream while %s", request_id, stage)
            raise UnknownRequestError(f"request {request_id} cannot be read: it is {stage}")
        request.stage = Stage.STREAMING
        try:
            while True:
                while request.parts:
                    part = merge_parts(request.parts)
                    yield part
                    if part.output is not None:
                        return
                    if len(part.token_ids) > 1:  # the reader is behind: it catches up in turns
                        await asyncio.sleep(0)
                if request.error is not None:
                    raise request.error
                request.wake.clear()
                await request.wake.wait()
        finally:
            request.stage = Stage.DONE
            self._requests.pop(request_id, None)
            if not request.ended:
                self._abort(request)

    async def cancel(self, request_id: str) -> bool:
        """End a request; its stream finishes with reason `abort`. False: it had ended before."""
        request = self._requests.get(request_id)
        if request is None or request.ended:
            return False
        self._abort(request)
        return True

    def drop(self, request_id: str) -> None:
        """Cancel a request that nobody is going to read."""
        request = self._requests.pop(request_id, None)
        if request is not None and request.stage is Stage.OPEN and not request.ended:
            self._abort(request)

    def _abort(self, request: _OpenRequest) -> None:
        if self._link.dead is None:
            try:
                self._link.send(Finish(request.names))
            except EngineDeadError:
                logger.warning("request %s: the engine is gone", request.request_id)

    # ---- what the engine says ------------------------------------------------------------------

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._on_outputs(message)
        elif isinstance(message, Rejected):
            ends = [TokenUpdate(name, [], ABORTED) for name in message.request_ids]
            self._outputs.process(ends)  # forget them
            for name in message.request_ids:
                self._counting.pop(name, None)
            request = self._requests.get(message.group)
            if request is not None:
                text = message.error
                fault: LlaisysError = QueueTimeoutError(text)
                if not message.timed_out:
                    fault = RejectedError(text, field=message.field, code=message.code)
                self._end(request, fault)
        elif isinstance(message, Needs):
            self.needs = message
            self.opened.set()
        elif isinstance(message, Ready):
            self._opening = asyncio.create_task(self._open(message))

    def _on_outputs(self, message: Outputs) -> None:
        updates = [update.update() for update in message.updates]
        for update in updates:
            done = update.status.finished
            find = self._counting.pop if done else self._counting.get
            count = find(update.request_id, None)
            if count is not None and update.token_ids:
                count(len(update.token_ids))
        parts, stopped = self._outputs.process(updates)
        if stopped:
            self._link.send(Finish(stopped, stopped=True))  # not answered
            for name in stopped:
                self._counting.pop(name, None)
        for part in parts:
            request = self._requests.get(part.request_id)
            if request is None:
                continue
            request.parts.append(part)
            request.ended = part.output is not None
            request.wake.set()

    async def _open(self, message: Ready) -> None:
        info = message.model_info()
        try:
            engine = self.config.engine
            tokenizer = await asyncio.to_thread(
                open_tokenizer, info, engine.tokenizer, engine.chat_template
            )
            defaults = sampling_defaults(info.generation_defaults, self.config.sampling)
            self._inputs = InputProcessor(info, tokenizer, engine.seed, defaults)
        except Exception as error:
            logger.exception("the tokenizer cannot be opened")
            self._link.give_up(f"the tokenizer cannot be opened: {error}")
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
        self.opened.set()
        self.ready.set()
        for callback in self.on_death:
            callback(reason)

    def _fail_all(self, reason: str) -> None:
        self._counting.clear()
        for request in list(self._requests.values()):
            if not request.ended:
                self._end(request, EngineDeadError(reason))

    def _end(self, request: _OpenRequest, error: LlaisysError) -> None:
        request.error = error
        request.ended = True
        request.wake.set()
