"""ASGI middleware: request id and log, Host and Origin, API key, body.

Order, outermost first: `RootPath`, `RequestContext`, `HostGuard`, CORS, `KeyGuard`, `BodyGuard`,
the routes.
Plain ASGI rather than Starlette's BaseHTTPMiddleware, which hides disconnects. Every scope is of
type http: the server runs without websockets and lifespan events.
"""

import asyncio
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llaisys.common.logs import log_event
from llaisys.server.errors import ApiError, ErrorShape, error_type, internal_error, is_fault
from llaisys.server.http.key_budgets import ANONYMOUS, KeyRing
from llaisys.server.http.response_bodies import json_bytes
from llaisys.server.schemas.fields import IGNORED_HEADER, FieldNotes
from llaisys.server.thread_pool import current_owner

logger = logging.getLogger("llaisys.server")

LOGGED_FIELD = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")
BODIES_FULL = "too_many_bodies"
FREE_BODY_BYTES = 64 << 10
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
MAX_LOGGED_ORIGINS = 8
PROBE_ROUTES = frozenset({"/health", "/live", "/ping", "/ready", "/metrics"})  # logged at debug
# No Content-Type, or curl's default. `HostGuard` stops forms of web pages.
UNTYPED = ("", "application/x-www-form-urlencoded")
# Pages that this machine serves: allowed without --allowed-origin.
LOCAL_ORIGIN = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
API_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)


def header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


async def respond_error(scope: Scope, send: Send, error: ApiError) -> None:
    """Send an error response and record its reason for the log."""
    record_error(scope, error)
    body = json_bytes(error_object(scope, error))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((key.lower().encode(), value.encode()) for key, value in error.headers.items()),
    ]
    if error.status in (408, 413) or error.code == BODIES_FULL:
        headers.append((b"connection", b"close"))  # do not read the rest of the body
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_object(scope: Scope, error: ApiError) -> dict[str, Any]:
    """Return the body of an error in the format of the request's API."""
    shape: ErrorShape = scope["state"]["shape_of"](scope["path"])
    return shape(error, scope["state"]["request_id"])


def record_error(scope: Scope, error: ApiError) -> None:
    """Record error code and field for the log line of the request. The message is not logged: it
    may contain text of the client (a model name, a template error)."""
    state = scope["state"]
    state["error"] = error.code or error_type(error.status)
    if error.param and LOGGED_FIELD.fullmatch(error.param):
        state["param"] = error.param


@dataclass(slots=True)
class RequestContext:
    """Assigns request ids, logs one line per request, and answers unexpected exceptions with a 500
    that contains only the id."""

    app: ASGIApp
    on_done: Callable[[str, str, int, FieldNotes | None], None]  # method, route, status, ignored
    shape_of: Callable[[str], ErrorShape] = lambda path: ApiError.body  # error format of a path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = header(scope, b"x-request-id")
        request_id = given if given and REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["owner"] = ANONYMOUS
        state["shape_of"] = self.shape_of
        at_end: list[Callable[[], None]] = []  # callbacks that release resources
        state["at_end"] = at_end
        state["write_body"] = send
        start, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                present = {key for key, _ in headers}
                headers += [pair for pair in API_HEADERS if pair[0] not in present]
                headers.append((b"x-request-id", request_id.encode()))
                notes: FieldNotes | None = state.get("field_notes")
                if notes is not None and notes.ignored:
                    headers.append((IGNORED_HEADER.encode(), notes.header.encode()))
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except BaseException as error:
            if not is_fault(error):
                raise
            logger.error("request %s failed", request_id, exc_info=error)
            if not status:
                await respond_error(scope, send_with_id, internal_error())
        finally:
            for release in at_end:
                release()
            self._log(scope, request_id, status, time.monotonic() - start)

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        notes: FieldNotes | None = scope["state"].get("field_notes")
        self.on_done(scope["method"], route, status or 499, notes)
        if notes is not None and notes.counts:
            log_event(
                logger,
                logging.DEBUG,
                "ignored fields",
                request_id=request_id,
                route=route,
                fields=notes.header,
                count=notes.counts.total(),
            )
        is_probe = route in PROBE_ROUTES and status in (200, 503)
        log_event(
            logger,
            logging.DEBUG if is_probe else logging.INFO,
            "request",
            request_id=request_id,
            method=scope["method"],
            route=route,
            status=status or 499,
            latency_ms=round(1e3 * seconds, 1),
            error=scope["state"].get("error"),
            param=scope["state"].get("param"),
            key=scope["state"].get("key"),
            **scope["state"].get("log", {}),
        )


class RootPath:
    """Removes the path of --root-path from requests that have it."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self.app = app
        self.root = "/" + root.strip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(self.root + "/"):
            scope = {**scope, "path": scope["path"].removeprefix(self.root)}
        await self.app(scope, receive, send)


class HostGuard:
    """Against DNS rebinding and cross-site requests: the Host must be an IP address, localhost or
    a configured name, and an Origin must be our own, one of this machine or an allowed one."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...], origins: tuple[str, ...]) -> None:
        self.app = app
        self.hosts = {host.lower() for host in hosts} | {"localhost"}
        self._logged_origins: set[str] = set()
        self.origins = {origin.lower().rstrip("/") for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except ApiError as error:
            await respond_error(scope, send, error)
        else:
            await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        hosts = [value for key, value in scope["headers"] if key == b"host"]
        if len(hosts) != 1:
            raise ApiError(400, f"{len(hosts)} Host headers; there must be 1")
        host = hosts[0].decode("latin-1").lower()
        if not self._is_allowed(host):
            raise ApiError(
                403, "this Host is not served here; see --allowed-host", code="host_not_allowed"
            )
        origin = header(scope, b"origin")
        if origin is None:
            return
        origin = origin.lower()
        if "*" in self.origins or origin in self.origins or LOCAL_ORIGIN.fullmatch(origin):
            return
        if origin.partition("://")[2] != host:  # a proxy may have changed the scheme
            self._hint(origin, scope["state"]["request_id"])
            if scope["method"] in SAFE_METHODS:  # the browser hides the response from the page
                return
            raise ApiError(
                403, "this Origin is not allowed; see --allowed-origin", code="origin_not_allowed"
            )

    def _hint(self, origin: str, request_id: str) -> None:
        """Log how to allow an origin, once per origin. The origin is client text and not logged."""
        if origin not in self._logged_origins and len(self._logged_origins) < MAX_LOGGED_ORIGINS:
            self._logged_origins.add(origin)
            logger.warning(
                "request %s: a page of another origin was blocked (a CORS error in the browser); "
                "--allowed-origin ORIGIN, such as http://localhost:3000, allows it",
                request_id,
            )

    def _is_allowed(self, host: str) -> bool:
        if "*" in self.hosts:
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self.hosts or host in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


@dataclass(slots=True)
class KeyGuard:
    """Requires a key if keys are configured, except for probes and the web UI's files."""

    app: ASGIApp
    ring: KeyRing
    is_public: Callable[[str, str], bool]  # (method, path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.ring):
            owner = self.ring.owner(header(scope, b"authorization"))
            if owner is None and (key := header(scope, b"x-api-key")) is not None:
                owner = self.ring.owner(f"Bearer {key}")  # as Anthropic's clients send it
            if owner is not None:
                scope["state"]["owner"] = owner
                current_owner.set(owner)
                scope["state"]["key"] = self.ring.name(owner)
            elif not self.is_public(scope["method"], scope["path"]):
                error = ApiError(
                    401,
                    "a valid API key is needed: Authorization: Bearer KEY",
                    code="invalid_api_key",
                )
                await respond_error(scope, send, error)
                return
        await self.app(scope, receive, send)


@dataclass(slots=True)
class BodyBudget:
    """Limits the bytes of received bodies that are not parsed yet. The first FREE_BODY_BYTES of a
    body are free, so large bodies never block small requests; the connection limit bounds those."""

    max_bytes: int
    used: int = 0

    def fits(self, count: int) -> bool:
        return self.used + max(0, count - FREE_BODY_BYTES) <= self.max_bytes


@dataclass(slots=True)
class BodyGuard:
    """Requires JSON bodies within a size, a time and the shared budget. Bodies of another type for
    paths without a route reach the app, which responds with a 404. `takes_untyped`: whether the
    bodies of a path are JSON without a Content-Type, too."""

    app: ASGIApp
    max_bytes: int
    timeout: float
    budget: BodyBudget
    has_route: Callable[[Scope], bool]
    takes_untyped: Callable[[str], bool] = lambda path: False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in SAFE_METHODS:
            await self.app(scope, receive, send)
            return
        counted = 0

        def count(size: int) -> None:
            """Set the counted bytes of this body to `size`."""
            nonlocal counted
            large = max(0, size - FREE_BODY_BYTES)
            self.budget.used += large - counted
            counted = large

        try:
            body = await self._read(scope, receive, count)
        except ApiError as error:
            count(0)
            await respond_error(scope, send, error)
            return
        try:
            if body is not None:
                scope["state"]["body_parsed"] = lambda: count(0)
                waiting, body = replay(body, receive), None
                await self.app(scope, waiting, send)
        finally:
            count(0)

    async def _read(
        self, scope: Scope, receive: Receive, count: Callable[[int], None]
    ) -> bytearray | None:
        """Read the whole body; None when the client disconnected."""
        length = header(scope, b"content-length")
        if length is not None and (not length.isdigit() or int(length[:20]) > self.max_bytes):
            raise self._too_large()
        if length is not None and not self.budget.fits(int(length)):
            raise self._full()
        body, deadline = bytearray(), time.monotonic() + self.timeout
        more = True
        while more:
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body was not complete after {self.timeout:g} s") from None
            if message["type"] == "http.disconnect":
                count(0)
                return None
            body += message.get("body", b"")
            if len(body) > self.max_bytes:
                raise self._too_large()
            count(len(body))
            if not self.budget.fits(0):
                raise self._full()
            more = message.get("more_body", False)
        if body:
            kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
            if kind in UNTYPED and self.takes_untyped(scope["path"]):
                others = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
                scope["headers"] = [*others, (b"content-type", b"application/json")]
            elif kind != "application/json" and self.has_route(scope):
                raise ApiError(415, "the body must be JSON: Content-Type: application/json")
        return body

    def _full(self) -> ApiError:
        return ApiError(
            503,
            f"too many bodies are being received; at most {self.budget.max_bytes} bytes allowed",
            code=BODIES_FULL,
            retry_after=1,
        )

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is too large; at most {self.max_bytes} bytes are allowed",
            code="body_too_large",
        )


def replay(body: bytearray, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """Return a `receive` that returns the body once, without keeping it, then forwards."""
    pending = [body]

    async def next_message() -> Message:
        if pending:
            return {"type": "http.request", "body": bytes(pending.pop()), "more_body": False}
        return await receive()

    return next_message
