"""The guards: host, origin, API key, body. Plain ASGI, so that nothing hides a disconnect.

Order, outermost first: `RequestContext`, `HostGuard`, CORS, `KeyGuard`, `BodyGuard`, the routes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llaisys.common.logs import log_event
from llaisys.server.errors import ApiError, ErrorShape, error_type, internal_error, is_fault
from llaisys.server.http.payload import json_bytes
from llaisys.server.keys.ring import ANONYMOUS, KeyRing
from llaisys.server.openai.fields import IGNORED_HEADER
from llaisys.server.thread_pool import current_owner

logger = logging.getLogger("llaisys.server")

LOGGED_FIELD = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")
BODIES_FULL = "too_many_bodies"
FREE_BODY_BYTES = 64 << 10
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
MAX_ORIGINS_TOLD = 8  # in the log
# Ollama's clients, curl among them, name no type, or curl's own; `HostGuard` knows a page's form.
UNTYPED = ("", "application/x-www-form-urlencoded")
UNTYPED_PATHS = ("/api/",)
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


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    body = json_bytes(error_object(scope, error))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((key.lower().encode(), value.encode()) for key, value in error.headers.items()),
    ]
    if (
        error.status in (408, 413) or error.code == BODIES_FULL
    ):  # the rest of the body is not worth reading
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(scope: Scope, send: Send, error: ApiError) -> None:
    """Answer with an error, and leave its reason for the log."""
    note_refusal(scope, error)
    await send_error(scope, send, error)


def error_object(scope: Scope, error: ApiError) -> dict[str, Any]:
    """The body of an error in the shape of the door that the request came to."""
    shape: ErrorShape = scope["state"]["error_shape"]
    return shape(error, scope["state"]["request_id"])


def note_refusal(scope: Scope, error: ApiError) -> None:
    """For the request's line in the log: why, and which field. Not the words of the answer, which
    may have the client's in them (the name of a model, what a template says)."""
    state = scope["state"]
    state["error"] = error.code or error_type(error.status)
    if error.param and LOGGED_FIELD.fullmatch(error.param):
        state["param"] = error.param


class RequestContext:
    """Gives every request its id, logs one line for each, and turns a bug into a 500 that says
    nothing but the id."""

    def __init__(
        self,
        app: ASGIApp,
        on_done: Callable[[str, str, int], None],
        shape_of: Callable[[str], ErrorShape] = lambda path: ApiError.body,
    ) -> None:
        self.app = app
        self.on_done = on_done  # (method, route, status)
        self.shape_of = shape_of  # path -> how its door writes errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        request_id = given if given and REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["owner"] = ANONYMOUS
        state["error_shape"] = self.shape_of(scope["path"])
        at_end: list[Callable[[], None]] = []  # what the request holds until it has been answered
        state["at_end"] = at_end
        start, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                present = {key for key, _ in headers}
                headers += [pair for pair in API_HEADERS if pair[0] not in present]
                headers.append((b"x-request-id", request_id.encode()))
                if ignored := state.get("ignored_fields"):
                    headers.append((IGNORED_HEADER.encode(), ignored.encode()))
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except BaseException as error:
            if not is_fault(error):
                raise
            logger.error("request %s failed", request_id, exc_info=error)
            if not status:
                await refuse(scope, send_with_id, internal_error())
        finally:
            for release in at_end:
                release()
            self._note(scope, request_id, status, time.monotonic() - start)

    def _note(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self.on_done(scope["method"], route, status or 499)
        log_event(
            logger,
            logging.INFO,
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


class HostGuard:
    """Against DNS rebinding and cross-site requests: the Host must be an IP address, localhost or
    a configured name, and an Origin must be our own or an allowed one."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...], origins: tuple[str, ...]) -> None:
        self.app = app
        self.hosts = {host.lower() for host in hosts} | {"localhost"}
        self._told: set[str] = set()  # origins that the log has a hint about
        self.origins = {origin.lower().rstrip("/") for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                await refuse(scope, send, error)
                return
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        hosts = [value for key, value in scope["headers"] if key == b"host"]
        if len(hosts) != 1:
            raise ApiError(400, f"{len(hosts)} Host headers; there must be 1")
        host = hosts[0].decode("latin-1").lower()
        if not self._known(host):
            raise ApiError(
                403, "this Host is not served here; see --allowed-host", code="host_not_allowed"
            )
        origin = header(scope, b"origin")
        if origin is None:
            return
        origin = origin.lower()
        if "*" in self.origins or origin in self.origins:
            return
        if origin.partition("://")[2] != host:  # whatever a proxy made of the scheme
            self._hint(origin, scope["state"]["request_id"])
            if scope["method"] in SAFE_METHODS:  # the browser keeps the answer from the page
                return
            raise ApiError(
                403, "this Origin is not allowed; see --allowed-origin", code="origin_not_allowed"
            )

    def _hint(self, origin: str, request_id: str) -> None:
        """For whoever wonders why their page's browser reports a CORS error: once an origin, which
        is the client's own word and so not shown."""
        if origin not in self._told and len(self._told) < MAX_ORIGINS_TOLD:
            self._told.add(origin)
            logger.warning(
                "request %s: a page of another origin was kept from this server (its browser calls "
                "it CORS); --allowed-origin ORIGIN, such as http://localhost:3000, lets it in",
                request_id,
            )

    def _known(self, host: str) -> bool:
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


class KeyGuard:
    """Every route needs a key when there are keys, but for /health and the web UI's files."""

    def __init__(self, app: ASGIApp, ring: KeyRing, is_public: Callable[[str, str], bool]) -> None:
        self.app = app
        self.ring = ring
        self.is_public = is_public  # (method, path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(self.ring):
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
                await refuse(scope, send, error)
                return
        await self.app(scope, receive, send)


class BodyBudget:
    """Bytes of all bodies that have arrived and are not parsed yet. What is small does not count:
    large bodies never keep small requests out, and connections bound how many there are."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used = 0

    def fits(self, count: int) -> bool:
        return self.used + max(0, count - FREE_BODY_BYTES) <= self.max_bytes


class BodyGuard:
    """Bodies are JSON, of bounded size, arrive in bounded time, and share one budget."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float, budget: BodyBudget) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.timeout = timeout
        self.budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self.app(scope, receive, send)
            return
        counted = 0

        def count(size: int) -> None:
            """The bytes of this body are now `size`."""
            nonlocal counted
            large = max(0, size - FREE_BODY_BYTES)
            self.budget.used += large - counted
            counted = large

        try:
            body = await self._read(scope, receive, count)
        except ApiError as error:
            count(0)
            await refuse(scope, send, error)
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
        """The whole body; None when the client hung up."""
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
            if kind in UNTYPED and scope["path"].startswith(UNTYPED_PATHS):
                others = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
                scope["headers"] = [*others, (b"content-type", b"application/json")]
            elif kind != "application/json":
                raise ApiError(415, "the body must be JSON: Content-Type: application/json")
        return body

    def _full(self) -> ApiError:
        return ApiError(
            503,
            f"too many bodies are on their way; at most {self.budget.max_bytes} bytes are taken",
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
    """A `receive` that hands out the body once, keeps nothing of it, then waits for the
    disconnect."""
    waiting = [body]

    async def next_message() -> Message:
        if waiting:
            return {"type": "http.request", "body": bytes(waiting.pop()), "more_body": False}
        return await receive()

    return next_message
