"""The server's application and metrics without a running engine."""

from __future__ import annotations

import functools
from typing import Any

from llaisys.server.app import make_app
from llaisys.server.config import ServerConfig
from llaisys.server.generation.service import SharedState
from llaisys.server.model_entries import entries_of
from llaisys.server.models.opening import open_models
from llaisys.server.sessions.store import SessionStore

NAMES = ("mock", "org/two")


def shared_state(*models: str) -> tuple[SharedState, Any]:
    """The state of a server with `models` that are not loaded, and its model manager."""
    entries = entries_of(models, {}) if models else ()
    config = ServerConfig(models=entries, api_keys=("key",), serve_webui=False)
    shared = SharedState(config, SessionStore(":memory:"))
    return shared, open_models(shared, None)


@functools.cache
def application() -> Any:
    """The FastAPI application inside its middleware."""
    app: Any = make_app(*shared_state(*NAMES))
    while not hasattr(app, "openapi"):
        app = app.app
    return app
