"""State that routes use: `SharedState` for the whole server, a `Service` for each model."""

import functools
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from fastapi import Request

from llaisys.common.types import ModelInfo
from llaisys.server.config import ServerConfig
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.engine_client.lora_table import LoraTable
from llaisys.server.errors import ApiError, EngineNotReadyError
from llaisys.server.generation.generation import Generation, Registry
from llaisys.server.generation.slots import SlotTable
from llaisys.server.http.key_budgets import KeyRing
from llaisys.server.http.limits import Admission, Budget
from llaisys.server.metrics import Metrics, ModelMetrics
from llaisys.server.schemas.base import conflicting_field
from llaisys.server.schemas.sampling import SamplingFields
from llaisys.server.sessions.responses import ResponseStore
from llaisys.server.sessions.store import SessionStore
from llaisys.server.sessions.turns import SessionTurns
from llaisys.server.thread_pool import BoundedThreadPool

try:
    VERSION = metadata.version("llaisys")
except metadata.PackageNotFoundError:  # run from the source tree
    VERSION = "0+source"
BODY_THREADS = 1  # parsing holds the GIL: a second thread gains nothing
MAX_WAITING_BODIES = 64
MAX_EMBEDDING_VALUES = 8 << 20  # of all requests in flight


class SharedState:
    """State of the whole server."""

    def __init__(self, config: ServerConfig, sessions: SessionStore) -> None:
        self.config = config
        self.sessions = sessions
        self.turns = SessionTurns(sessions)
        self.responses = ResponseStore(sessions)
        self.metrics = Metrics()
        self.keys = KeyRing(config.keys)
        self.registry = Registry()
        self.body_pool = BoundedThreadPool("body", BODY_THREADS, MAX_WAITING_BODIES)


class Service:
    """State of one model. With several models its engine may be unloaded; a service returned by
    `service_for` stays loaded until the request ends."""

    def __init__(self, shared: SharedState, config: ServerConfig) -> None:
        """`config.engine` is the configuration of this model."""
        self.shared = shared
        self.config = config
        self.sessions = shared.sessions
        self.turns = shared.turns
        self.responses = shared.responses
        self.keys = shared.keys
        self.registry = shared.registry
        self.body_pool = shared.body_pool
        self.model_names: tuple[str, ...] = config.served_model_names
        self.slots = SlotTable(config.slot_save_path, config.max_num_seqs)
        self.loras = LoraTable(config.engine.lora.lora_modules)
        self.metrics = ModelMetrics(shared.metrics, lambda: self.metric_name)
        self.admission = Admission(config.limits, config.max_num_seqs, config.max_per_key)
        # Each logprob takes over 100 bytes.
        self.logprob_budget = Budget(
            config.limits.max_total_logprobs, "logprobs", "too_many_logprobs"
        )
        self.embedding_budget = Budget(MAX_EMBEDDING_VALUES, "embedding values", "too_many_vectors")
        self.admission.on_rejected = self.metrics.request_rejected
        self.created = int(time.time())
        self.engine_or_none: AsyncLLMEngine | None = None  # None while unloaded
        self.known_info: ModelInfo | None = None  # of the latest engine that was ready
        self._defaults: dict[str, Any] = {}

    @property
    def engine(self) -> AsyncLLMEngine:
        if self.engine_or_none is None:
            raise EngineNotReadyError("the model is not loaded")
        return self.engine_or_none

    @property
    def is_loaded(self) -> bool:
        return self.engine_or_none is not None and self.engine_or_none.is_ready

    @property
    def metric_name(self) -> str:
        """The model_name label of metrics; empty while the name is unknown."""
        return self.model_names[0] if self.model_names else ""

    def model_loaded(self) -> None:
        """Store what the ready engine reports. Called once per load."""
        engine = self.engine
        self._defaults = dict(engine.inputs.defaults)
        # The source may contain a whole vocabulary.
        self.known_info = replace(self.info, tokenizer_source=None)
        if not self.model_names:
            self.model_names = (default_model_name(self.config.engine.model, self.info.model_path),)
        gone, new = self.loras.changes()
        if gone or new:
            engine.restore_loras(gone, new)
        self.metrics.create_series()

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: a hash of the program version and the model."""
        info = self.info
        return _fingerprint(
            self.model_names[0], info.model_type, info.vocab_size, info.max_model_len
        )

    @property
    def info(self) -> ModelInfo:
        if self.engine.model_info is None:
            raise EngineNotReadyError("the model is still being loaded")
        return self.engine.model_info

    @property
    def max_items(self) -> int:
        """Item limit of a body, raised to allow a prompt of token ids that fills the context."""
        info = self.known_info
        return max(self.config.limits.max_body_items, 2 * info.max_model_len if info else 0)

    def check_model(self, name: str | None) -> str:
        """Return the model name for the response. Raises ApiError 404 for an unknown name."""
        _ = self.engine.inputs  # ready, or raises
        if name is None:
            return self.model_names[0]
        if name not in self.model_names and name not in self.loras:
            raise unknown_model(name, (*self.model_names, *self.loras.names))
        return name

    def has_model(self, name: str) -> bool:
        return name in self.model_names or name in self.loras

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names of the model, then of its adapters."""
        return (*self.model_names, *self.loras.names)

    def parent_of(self, name: str) -> str | None:
        """The base model of an adapter; None: it is a model."""
        return self.model_names[0] if name in self.loras else None

    def lora_of(self, model: str, body: SamplingFields) -> str | None:
        """Return the adapter of a request: its model name, its `lora` field, or the default of
        llama.cpp's routes."""
        named = model if self.parent_of(model) is not None else None
        given = body.lora
        if not given:
            return named or (self.loras.default if body.has_default_lora else None)
        scales = given if isinstance(given, str) else [(item.id, item.scale) for item in given]
        chosen = self.loras.select(scales)
        if named is not None and chosen != named:
            raise conflicting_field("lora", "another adapter", "left out: model names an adapter")
        return chosen

    def model_card(self, name: str) -> dict[str, Any]:
        """Return OpenAI's model object; max_model_len is null before the first load."""
        info = self.known_info
        is_lora = name in self.loras and name not in self.model_names
        created = self.loras.find(name).created if is_lora else self.created
        return {
            "id": name,
            "object": "model",
            "created": created,
            # Anthropic's names
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
            "owned_by": "llaisys",
            "root": name,
            "parent": self.parent_of(name) if is_lora else None,
            "max_model_len": info.max_model_len if info is not None else None,
            "default_sampling_params": self._defaults,
        }

    def generation(self, owner: str, public_ids: Sequence[str], count: int) -> Generation:
        parts = (self.engine, self.admission, self.keys.budget(owner), self.metrics, self.registry)
        return Generation(*parts, owner, public_ids, count)


def reload_keys(shared: SharedState, services: Sequence[Service]) -> None:
    """Read the key file again. Raises InvalidInputError, and changes nothing, if invalid."""
    shared.config = config = shared.config.with_reloaded_keys()
    shared.keys.replace(config.keys)
    shared.sessions.file.max_owner_bytes = config.max_session_bytes_per_key
    for service in services:
        service.admission.max_per_key = config.max_per_key


@functools.lru_cache(64)
def _fingerprint(*values: Any) -> str:
    digest = hashlib.sha256(repr((VERSION, *values)).encode()).hexdigest()
    return f"b{VERSION}-{digest[:8]}"


def unknown_model(name: str, known: Sequence[str]) -> ApiError:
    return ApiError(
        404,
        f"the model {name[:200]!r} is not served here; there is: {', '.join(known)}",
        param="model",
        code="model_not_found",
    )


def default_model_name(given: str | None, path: str) -> str:
    """Return the default name of a model: the hub id, or the file name of a path."""
    if given is not None and not Path(given).exists():
        return given
    return Path(path).name.removesuffix(".gguf")


def service_of(request: Request) -> Service:
    """Return the service of the first model, loaded or not: for state that all models share
    (sessions, the registry, thread pools, limits)."""
    return request.app.state.models.first


def owner_of(request: Request) -> str:
    return request.scope["state"]["owner"]


async def session_model(request: Request, session_id: str | None) -> str | None:
    """Return the served model that last answered in a session; None with a single model."""
    models = request.app.state.models
    if session_id is None or not models.has_several:
        return None
    name = await service_of(request).sessions.model_of(owner_of(request), session_id)
    return name if name is not None and models.has_model(name) else None


async def service_for(request: Request, model: str | None) -> Service:
    """Return the service of a model (None: the first model), loaded and leased until the request
    ends. Raises ApiError 404 for an unknown model, 503 when it cannot be loaded now."""
    service, release = await request.app.state.models.lease(model)
    request.scope["state"]["at_end"].append(release)
    return service
