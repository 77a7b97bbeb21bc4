"""The ASGI application: routes and the middleware around them."""

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match
from starlette.types import ASGIApp, Scope

from llaisys.server.anthropic import routes as anthropic_routes
from llaisys.server.errors import ApiError, ErrorShape
from llaisys.server.generation.service import VERSION, SharedState
from llaisys.server.http import error_handlers
from llaisys.server.http.middleware import (
    LOCAL_ORIGIN,
    BodyBudget,
    BodyGuard,
    HostGuard,
    KeyGuard,
    RequestContext,
    RootPath,
)
from llaisys.server.http.request_bodies import ProtocolRouter, Turns
from llaisys.server.http.response_bodies import json_bytes, json_response
from llaisys.server.http.webui import WebUi, find_webui
from llaisys.server.llamacpp import routes as llamacpp_routes
from llaisys.server.metrics import CONTENT_TYPE
from llaisys.server.models.collectors import START_HEADER, with_llama_types
from llaisys.server.models.manager import Models
from llaisys.server.models.served import SingleModel
from llaisys.server.ollama import routes as ollama_routes
from llaisys.server.openai import embedding_routes, lora_routes, session_routes, vllm_routes
from llaisys.server.openai import routes as openai_routes
from llaisys.server.responses import routes as responses_routes
from llaisys.server.responses.background import BackgroundResponses
from llaisys.server.schemas.fields import IGNORED_HEADER, FieldNotes

PUBLIC = frozenset({"/health", "/live", "/ping", "/ready"})

# OpenAI's routes under the paths of clients whose base URL has no /v1.
without_v1 = ProtocolRouter(llamacpp_routes.error_body, tags=["llama.cpp"])
without_v1.post("/chat/completions")(openai_routes.chat_completions)
without_v1.post("/chat/completions/input_tokens")(openai_routes.count_chat_tokens)
without_v1.get("/models")(openai_routes.models)

ROUTERS = (
    openai_routes.router,
    embedding_routes.router,
    without_v1,
    responses_routes.without_v1,
    llamacpp_routes.completion_router,
    llamacpp_routes.router,
    responses_routes.router,
    anthropic_routes.router,
    ollama_routes.router,
    lora_routes.router,
    vllm_routes.router,
    session_routes.router,
)


def router_of(path: str) -> ProtocolRouter:
    """Return the router that has `path`; the default is OpenAI's."""
    return next((router for router in ROUTERS if router.has_path(path)), openai_routes.router)


def error_shape(path: str) -> ErrorShape:
    return router_of(path).error_shape


def takes_untyped(path: str) -> bool:
    return router_of(path).untyped_bodies


def make_app(shared: SharedState, models: Models) -> ASGIApp:
    """Add the routes of all protocol adapters and wrap them in the middleware."""
    config = shared.config
    app = FastAPI(
        title="NovaInfer",
        version=VERSION,
        docs_url=None,  # the page loads scripts from a CDN
        redoc_url=None,
        responses={400: {"description": "Invalid request; the body has the reason."}},
    )
    app.state.models = models
    app.state.background = BackgroundResponses()
    app.state.turns = Turns()
    error_handlers.install(app)
    for router in ROUTERS:
        app.include_router(router)
    add_status_routes(app, shared, models)
    folder = find_webui(config.webui) if config.serve_webui else None
    webui = WebUi(folder, config.mcp_origins)
    for path in webui.assets:
        app.add_api_route(path, webui.serve, methods=["GET", "HEAD"], include_in_schema=False)
    limits = config.limits

    def is_public(method: str, path: str) -> bool:
        return path in PUBLIC or webui.has(method, path)

    def count(method: str, route: str, status: int, notes: FieldNotes | None) -> None:
        shared.metrics.http_requests.labels(method, route, str(status)).inc()
        for kind, number in notes.counts.items() if notes is not None else ():
            shared.metrics.ignored_fields.labels(route, kind.value).inc(number)

    def has_route(scope: Scope) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for route in app.router.routes)

    budget = BodyBudget(limits.max_total_body_bytes)
    guarded: ASGIApp = BodyGuard(
        app, limits.max_body_bytes, limits.body_timeout, budget, has_route, takes_untyped
    )
    guarded = KeyGuard(guarded, shared.keys, is_public)
    # Around the keys: a browser sends a preflight without one.
    guarded = CORSMiddleware(
        guarded,
        allow_origins=config.allowed_origins,
        allow_origin_regex=LOCAL_ORIGIN.pattern,
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["*"],  # OpenAI's JavaScript client sends X-Stainless-* headers
        allow_private_network=True,
        expose_headers=["X-Request-Id", "Retry-After", IGNORED_HEADER],
    )
    guarded = HostGuard(guarded, (*config.allowed_hosts, config.host), config.allowed_origins)
    guarded = RequestContext(guarded, count, error_shape)
    return RootPath(guarded, config.root_path) if config.root_path else guarded


def add_status_routes(app: FastAPI, shared: SharedState, models: Models) -> None:
    one = models.first if isinstance(models, SingleModel) else None

    @app.get("/health", tags=["status"])
    @app.get("/ping", tags=["status"])
    @app.post("/ping", include_in_schema=False)
    async def health() -> Response:
        """200 when the model is loaded and the engine sends heartbeats. With several replicas one
        is enough; `status` is `degraded` while others are down. 503 otherwise; during loading
        with `status: loading`, the stage and its progress (0 to 1, null: unknown). With several
        models always 200: /v1/models has the state of each."""
        if one is None:
            return json_response({"status": "ok"})
        engine = one.engine
        if engine.problem is not None:
            raise ApiError(503, "the engine does not respond", code="engine_unhealthy")
        if engine.is_ready and engine.degraded:
            return json_response({"status": "degraded", "replicas_down": engine.degraded})
        if engine.is_ready:
            return json_response({"status": "ok"})
        stage, done, total = engine.loading or ("starting", 0, 0)
        progress = round(done / total, 3) if total else None
        body = {"status": "loading", "stage": stage, "progress": progress}
        return Response(
            json_bytes(body), 503, headers={"Retry-After": "1"}, media_type="application/json"
        )

    @app.get("/live", tags=["status"])
    async def live() -> dict[str, str]:
        """200 while this process responds, independent of the engine."""
        return {"status": "alive"}

    @app.get("/ready", tags=["status"])
    async def ready() -> dict[str, str]:
        """200 when a request would be admitted now."""
        engine = one.engine if one is not None else None
        if engine is not None and engine.problem is not None:
            raise ApiError(503, "the engine does not respond", code="engine_unhealthy")
        if engine is not None and not engine.is_ready:
            raise ApiError(503, "the model is still being loaded", code="loading", retry_after=1)
        if models.first.admission.closed is not None:
            raise ApiError(503, models.first.admission.closed, code="shutting_down")
        return {"status": "ready"}

    @app.get("/version", tags=["status"])
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/metrics", tags=["status"], response_class=Response)
    async def metrics(request: Request) -> Response:
        """Prometheus text format, with the header of llama.cpp's server."""
        if not shared.config.serve_metrics:
            raise ApiError(501, "/metrics is not served (--no-metrics)", code="unsupported")
        text = with_llama_types(shared.metrics.text())
        response = Response(text, media_type=CONTENT_TYPE)
        started = str(models.first.created).encode()
        response.raw_headers.append((START_HEADER, started))
        return response
