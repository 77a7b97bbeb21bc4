"""The ASGI application of a router: it forwards every request to a replica.

Its own paths are /health, /live and /metrics. A request that no replica has begun to answer is sent
to another one when the connection fails or the replica answers 503. A replica gets no requests
while its /ready does not answer 200, so a replica that drains after SIGTERM loses none.
Routers share no state: several processes may share an address (`--reuse-port`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.types import Receive, Scope, Send

from llaisys.common.http_client import Exchange, Header, HttpClient, HttpError
from llaisys.common.logs import log_event
from llaisys.common.validation import check_url
from llaisys.server.engine_client.replicas.router import Conversation, PrefixRouter, Route
from llaisys.server.errors import ApiError
from llaisys.server.http.event_stream import ClientDisconnected, unless_disconnected
from llaisys.server.http.middleware import error_object, header, respond_error
from llaisys.server.http.response_bodies import json_bytes
from llaisys.server.metrics import CONTENT_TYPE, PREFIX
from llaisys.server.route.config import RouteConfig

logger = logging.getLogger("llaisys.server.route")

M = TypeVar("M", Gauge, Counter)

BLOCK_UNITS = 64  # compared at once; see `prompts`
MIN_PROBE_TIMEOUT = 2.0  # seconds
CONNECT_TIMEOUT = 3.0  # seconds
MAX_IDLE = 256  # pooled connections of a replica
PROBE_HEADERS = ((b"host", b"localhost"),)
# Of one connection (RFC 9110, 7.6.1), or written anew.
HOP_HEADERS = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
)
WRITTEN_ANEW = HOP_HEADERS | {b"content-length", b"x-request-id"}


class Replica:
    def __init__(self, index: int, url: str) -> None:
        self.index = index
        self.url = url
        is_tls, host, port, _ = check_url("replicas", url)
        tls = ssl.create_default_context() if is_tls else None
        self.client = HttpClient(host, port, tls, CONNECT_TIMEOUT, MAX_IDLE)
        self.problem: str | None = "not probed yet"


class RouterApp:
    """`start` begins the probes, `close` ends them."""

    def __init__(self, config: RouteConfig) -> None:
        self.replicas = [Replica(index, url) for index, url in enumerate(config.replicas)]
        blocks = max(1, config.cached_tokens // BLOCK_UNITS)
        self._router = PrefixRouter(
            BLOCK_UNITS, blocks, len(self.replicas), [url.rstrip("/") for url in config.replicas]
        )
        self._interval = config.probe_interval
        self._probes: list[asyncio.Task[None]] = []
        self.registry = CollectorRegistry()

        def metric(kind: type[M], name: str, text: str) -> M:
            return kind(f"{PREFIX}route_{name}", text, ("replica",), registry=self.registry)

        self._up = metric(Gauge, "replica_up", "1 while the replica is ready")
        self._load = metric(Gauge, "replica_load", "Estimated open work, in tokens")
        self._requests = metric(Counter, "requests", "Requests sent to the replica")
        self._failures = metric(Counter, "failures", "Requests that the replica did not answer")

    def start(self) -> None:
        self._probes = [asyncio.create_task(self._probe(replica)) for replica in self.replicas]

    async def close(self) -> None:
        for task in self._probes:
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for replica in self.replicas:
            replica.client.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if method in ("GET", "HEAD") and path in ("/health", "/live", "/metrics"):
            await self._own(path, send)
            return
        body = bytearray()
        more = method not in ("GET", "HEAD")
        while more:  # BodyGuard limits its size
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            await self._forward(scope, receive, send, bytes(body))
        except ApiError as error:
            await respond_error(scope, send, error)

    # ---- replicas ------------------------------------------------------------------------------

    @property
    def _alive(self) -> set[int]:
        return {replica.index for replica in self.replicas if replica.problem is None}

    async def _probe(self, replica: Replica) -> None:
        while True:
            problem = None
            try:
                async with asyncio.timeout(max(self._interval, MIN_PROBE_TIMEOUT)):
                    answer = await replica.client.send("GET", b"/ready", PROBE_HEADERS, b"")
                    async for _ in answer.body():
                        pass
                if answer.status != 200:
                    problem = f"/ready answers {answer.status}"
            except (HttpError, TimeoutError) as error:
                problem = str(error) or "no answer"
            self._set_problem(replica, problem)
            await asyncio.sleep(self._interval)

    def _set_problem(self, replica: Replica, problem: str | None) -> None:
        was_up = replica.problem is None
        replica.problem = problem
        if was_up != (problem is None):
            event = "replica up" if problem is None else "replica down"
            log_event(logger, logging.INFO, event, replica=replica.url, reason=problem)
        if problem is not None and was_up:
            replica.client.close()

    def _assign(self, prompt: Prompt | None, owner: str, allowed: Collection[int]) -> Route:
        if prompt is None:  # state such as sessions is on the home of an API key
            home = self._router.home(owner, allowed)
            return self._router.assign([], owner, 0, 1, (home,))
        return self._router.assign(
            prompt.units, owner, prompt.max_tokens, prompt.choices, allowed, prompt.conversation
        )

    # ---- a request -----------------------------------------------------------------------------

    async def _forward(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        owner = owner_of(scope)
        prompt = prompt_of(scope["path"], body, owner, header(scope, SESSION_HEADER))
        try:
            await unless_disconnected(receive, self._answer(scope, send, body, owner, prompt))
        except ClientDisconnected:
            log_event(logger, logging.DEBUG, "client disconnected", path=scope["path"])

    async def _answer(
        self, scope: Scope, send: Send, body: bytes, owner: str, prompt: Prompt | None
    ) -> None:
        """Send the request to replicas until one answers, and pass the response on."""
        tried: set[int] = set()
        refused: Exchange | None = None
        while allowed := self._alive - tried:
            route = self._assign(prompt, owner, allowed)

            def on_token() -> None:
                nonlocal route
                route = self._router.prefilled(route)

            replica = self.replicas[route.replica]
            tried.add(route.replica)
            self._requests.labels(str(replica.index)).inc()
            try:
                answer = await replica.client.send(
                    scope["method"], target_of(scope), request_headers(scope), body
                )
                if answer.status == 503:
                    if refused is not None:
                        refused.close()
                    refused = answer
                    continue
                await self._pass_on(scope, send, answer, on_token)
                return
            except HttpError as error:
                self._failures.labels(str(replica.index)).inc()
                self._set_problem(replica, str(error))
            finally:
                self._router.done(route)
        if refused is not None:
            await self._pass_on(scope, send, refused)
            return
        raise ApiError(503, "no replica is ready", code="no_replica", retry_after=1)

    async def _pass_on(
        self, scope: Scope, send: Send, answer: Exchange, on_token: Callable[[], None] | None = None
    ) -> None:
        """`on_token` is called when the body begins."""
        kept = [pair for pair in answer.headers if pair[0] not in HOP_HEADERS | {b"x-request-id"}]
        start = {"type": "http.response.start", "status": answer.status, "headers": kept}
        is_stream = (b"content-type", b"text/event-stream") in [
            (name, value.partition(b";")[0].strip()) for name, value in kept
        ]
        await send(start)
        try:
            async for piece in answer.body():
                if on_token is not None:
                    on_token()
                    on_token = None
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except HttpError as error:
            log_event(logger, logging.ERROR, "response lost", path=scope["path"], reason=str(error))
            if not is_stream:
                raise ConnectionAbortedError("a replica ended within its response") from None
            lost = ApiError(503, "the replica has ended", code="replica_lost", retry_after=1)
            event = b"data: " + json_bytes(error_object(scope, lost)) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            answer.close()
        await send({"type": "http.response.body", "body": b""})

    # ---- own paths -----------------------------------------------------------------------------

    async def _own(self, path: str, send: Send) -> None:
        if path == "/metrics":
            alive = self._alive
            for replica in self.replicas:
                label = str(replica.index)
                self._up.labels(label).set(replica.index in alive)
                self._load.labels(label).set(self._router.load[replica.index])
            await respond(send, 200, generate_latest(self.registry), CONTENT_TYPE)
            return
        down = [replica.index for replica in self.replicas if replica.problem is not None]
        state: dict[str, Any] = {"status": "ok"}
        if path == "/health" and down:
            state = {"status": "degraded", "replicas_down": down}
        is_down = path == "/health" and len(down) == len(self.replicas)
        await respond(send, 503 if is_down else 200, json_bytes(state), "application/json")


async def respond(send: Send, status: int, body: bytes, content_type: str) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def owner_of(scope: Scope) -> str:
    """Return a digest of the API key; a key is not kept."""
    key = header(scope, b"authorization") or header(scope, b"x-api-key") or ""
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def target_of(scope: Scope) -> bytes:
    query: bytes = scope["query_string"]
    path: bytes = scope["raw_path"]
    return path + b"?" + query if query else path


def request_headers(scope: Scope) -> list[Header]:
    kept = [pair for pair in scope["headers"] if pair[0] not in WRITTEN_ANEW]
    return [*kept, (b"x-request-id", scope["state"]["request_id"].encode())]


UNIT = 4  # bytes
SESSION_HEADER = b"x-session-id"
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
TURNS = ("messages", "input", "prompt")  # fields with the prompt, in the order of preference
HEAD = ("model", "system", "instructions", "tools")  # fields that precede it


@dataclass(frozen=True, slots=True)
class Prompt:
    units: Sequence[int]
    max_tokens: int | None
    choices: int
    conversation: Conversation


def prompt_of(path: str, body: bytes, owner: str, session: str | None) -> Prompt | None:
    """Return the prompt; None for a body without one, or one that needs the state of a replica.
    `owner`: distinguishes API keys. `session`: identifies the conversation; None: its first turn
    does."""
    if path.startswith("/v1/sessions"):
        return None
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    if not isinstance(fields, dict):
        return None
    if path == "/v1/responses" and fields.get("store") is not False:
        return None  # a later request may name the stored response
    turns = next((fields[name] for name in TURNS if fields.get(name)), None)
    if turns is None:
        return None
    head = b"".join(_bytes(fields[name]) for name in HEAD if name in fields)
    units: Sequence[int]
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        texts = [head, *map(_bytes, turns)]
        answers = [index for index, turn in enumerate(turns, 1) if _is_answer(turn)]
        units = _units(b"".join(texts))
        begin = b"".join(texts[: answers[0]] if answers else texts)
        earlier = sum(map(len, texts[: answers[-1] + 1])) // UNIT if answers else 0
    elif isinstance(turns, list) and all(isinstance(token, int) for token in turns):
        units, begin, earlier = turns, _bytes(turns[:256]), 0
    else:
        text = head + _bytes(turns)
        units, begin, earlier = _units(text), text[: 256 * UNIT], 0
    name = session or fields.get("prompt_cache_key") or begin.hex()
    limit = next((fields[key] for key in LIMITS if isinstance(fields.get(key), int)), None)
    choices = fields.get("n")
    return Prompt(
        units,
        max(0, limit) if limit is not None else None,
        choices if isinstance(choices, int) and choices > 0 else 1,
        Conversation(f"{owner}\0{name}", earlier),
    )


def _is_answer(turn: dict[str, Any]) -> bool:
    """Whether a model generated the turn; tool calls of /v1/responses have no role."""
    return turn.get("role", "assistant") == "assistant"


def _bytes(value: Any) -> bytes:
    return (
        value.encode("utf-8", "replace") if isinstance(value, str) else msgspec.json.encode(value)
    )


def _units(text: bytes) -> Sequence[int]:
    return array("I", text[: len(text) // UNIT * UNIT])
