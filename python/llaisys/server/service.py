"""Everything that the routes share: engine, admission, metrics, sessions, names of the model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import Request

from llaisys.common.types import CompletionOutput, ModelInfo
from llaisys.server.config import ServerConfig
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.errors import ApiError, EngineNotReadyError
from llaisys.server.http.limits import Admission
from llaisys.server.metrics import Metrics
from llaisys.server.openai.generation import Generation, Registry
from llaisys.server.sessions.store import SessionStore


class Service:
    """One per server."""

    def __init__(
        self, config: ServerConfig, engine: AsyncLLMEngine, sessions: SessionStore
    ) -> None:
        self.config = config
        self.engine = engine
        self.sessions = sessions
        self.metrics = Metrics()
        self.registry = Registry()
        self.admission = Admission(config.limits, config.engine.scheduler.max_num_seqs)
        self.admission.on_rejected = self.metrics.request_rejected
        self.model_names: tuple[str, ...] = config.served_model_names
        self.created = int(time.time())
        self.busy_sessions: set[tuple[str, str]] = set()

    def model_loaded(self) -> None:
        """Called once, when the engine is ready."""
        if not self.model_names:
            self.model_names = (own_name(self.config.engine.model, self.info.model_path),)
        self.metrics.watch(self.engine, self.model_names[0])

    @property
    def info(self) -> ModelInfo:
        if self.engine.model_info is None:
            raise EngineNotReadyError("the model is still being loaded")
        return self.engine.model_info

    def check_model(self, name: str | None) -> str:
        """The model that a request is for; without a name, the one that there is."""
        _ = self.engine.inputs  # ready, or raises
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            raise ApiError(
                404,
                f"the model {name[:200]!r} is not served here; there is: {known}",
                param="model",
                code="model_not_found",
            )
        return name

    def model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "llaisys",
            "max_model_len": self.info.max_model_len,
            "default_sampling_params": {
                field: value
                for field, value in self.info.generation_defaults.items()
                if value is not None
            },
        }

    def generation(self, owner: str, public_ids: Sequence[str], count: int) -> Generation:
        return Generation(
            self.engine, self.admission, self.metrics, self.registry, owner, public_ids, count
        )

    @asynccontextmanager
    async def session_turn(
        self, owner: str, session_id: str | None, messages: list[dict[str, Any]]
    ) -> AsyncIterator[SessionTurn | None]:
        """The next turn of a session; None without one."""
        if session_id is None:
            yield None
            return
        turn = SessionTurn(self, owner, session_id, messages)
        try:
            await turn.load()
            yield turn
        finally:
            turn.leave()


class SessionTurn:
    """New messages behind a session's history. One turn of a session at a time; a turn that is
    cancelled or fails leaves the session as it was."""

    def __init__(
        self, service: Service, owner: str, session_id: str, new: list[dict[str, Any]]
    ) -> None:
        self.session_id = session_id
        self.messages = new  # with the history before them, after `load`
        self._service = service
        self._key = (owner, session_id)
        self._new = new
        self._position = 0
        self._kept = False
        if self._key in service.busy_sessions:
            raise ApiError(
                409, "this session is answering another request", code="session_busy", retry_after=1
            )
        service.busy_sessions.add(self._key)
        self._open = True

    async def load(self) -> None:
        history = await self._service.sessions.open_turn(*self._key)
        self._position = len(history)
        self.messages = [*history, *self._new]

    def keep(self) -> None:
        """The turn outlives its `with` block; `close` ends it."""
        self._kept = True

    def leave(self) -> None:
        if not self._kept:
            self.close()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._service.busy_sessions.discard(self._key)

    async def finish(self, output: CompletionOutput, model: str) -> None:
        """Store the turn if it came to its end."""
        if output.finish_reason in ("stop", "length"):
            answer = {"role": "assistant", "content": output.text}
            await self._service.sessions.append(
                *self._key, self._position, [*self._new, answer], model
            )


def own_name(given: str | None, path: str) -> str:
    """What a model is called when nobody says: as it was asked for, but never by a path."""
    if given is not None and not Path(given).exists():
        return given
    return Path(path).name.removesuffix(".gguf")


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
