"""Everything that the routes share: engine, admission, metrics, sessions, names of the model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import Request

from llaisys.common.types import ModelInfo
from llaisys.server.config import ServerConfig
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.errors import ApiError, EngineNotReadyError
from llaisys.server.generation.generation import Generation, Registry
from llaisys.server.http.limits import Admission
from llaisys.server.keys.ring import KeyRing
from llaisys.server.lanes import Lane
from llaisys.server.metrics import Metrics
from llaisys.server.sessions.responses import ResponseStore
from llaisys.server.sessions.store import SessionStore
from llaisys.server.sessions.turns import SessionTurns

BODY_THREADS = 1  # parsing keeps the interpreter to itself: a second thread gains nothing
MAX_WAITING_BODIES = 64


class Service:
    """One per server."""

    def __init__(
        self, config: ServerConfig, engine: AsyncLLMEngine, sessions: SessionStore
    ) -> None:
        self.config = config
        self.engine = engine
        self.sessions = sessions
        self.metrics = Metrics()
        self.keys = KeyRing(config.keys)
        self.metrics.watch_keys(self.keys)
        self.registry = Registry()
        self.admission = Admission(
            config.limits, config.engine.scheduler.max_num_seqs, config.max_per_key
        )
        self.admission.on_rejected = self.metrics.request_rejected
        self.model_names: tuple[str, ...] = config.served_model_names
        self.created = int(time.time())
        self.turns = SessionTurns(sessions)
        self.responses = ResponseStore(sessions)
        self.body_lane = Lane("body", BODY_THREADS, MAX_WAITING_BODIES)

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

    @property
    def max_items(self) -> int:
        """Of a body; a prompt of token ids that fills the context is let through."""
        info = self.engine.model_info
        return max(self.config.limits.max_body_items, 2 * info.max_model_len if info else 0)

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
            "default_sampling_params": self.engine.inputs.defaults,
        }

    def generation(self, owner: str, public_ids: Sequence[str], count: int) -> Generation:
        return Generation(
            self.engine,
            self.admission,
            self.keys.budget(owner),
            self.metrics,
            self.registry,
            owner,
            public_ids,
            count,
        )

    def read_keys_again(self) -> None:
        """Raises InvalidInputError, and changes nothing, when the file cannot be used."""
        self.config = config = self.config.with_keys_read_again()
        self.keys.replace(config.keys)
        self.admission.max_per_key = config.max_per_key
        self.sessions.max_owner_bytes = config.max_session_bytes_per_key


def own_name(given: str | None, path: str) -> str:
    """What a model is called when nobody says: as it was asked for, but never by a path."""
    if given is not None and not Path(given).exists():
        return given
    return Path(path).name.removesuffix(".gguf")


def service_of(request: Request) -> Service:
    """What is the same for every model: sessions, the registry, lanes, metrics."""
    service: Service = request.app.state.service
    return service


async def service_for(request: Request, model: str | None) -> Service:
    """The service of the model that a request is for (None: the one of those who do not say),
    loaded, and kept until the request has been answered. Every door to a model goes through here.
    Raises ApiError: 404 when it is not served here, 503 when it is not there now."""
    service = service_of(request)
    service.check_model(model)
    return service
