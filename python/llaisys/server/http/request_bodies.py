"""Parse and validate request bodies. Large ones are parsed in a thread.

The cost of JSON is in its items, not its bytes: two million numbers fit into 4 MB and take seconds
to validate. So the items are counted first, with a few C passes over the bytes.
"""

import asyncio
import inspect
import json
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from llaisys.server.errors import ApiError, ErrorShape
from llaisys.server.http.error_handlers import validation_error
from llaisys.server.schemas.fields import STRICT_HEADER, FieldNotes, is_strict_header

TURNS = 8  # requests that begin in one loop iteration, up to 1 ms each
INLINE_BYTES = 16 << 10  # smaller bodies are parsed on the event loop
SLICE_BYTES = 256 << 10  # scanned per call; other threads run in between
# Lists, objects and object fields cost more than numbers, so they have lower limits.
MAX_CONTAINERS = 16 << 10
MAX_FIELDS = 64 << 10


class Turns:
    """Lets a few tasks per loop iteration pass, in order: a wave of requests must not hold the loop
    while streams wait for their tokens."""

    def __init__(self, count: int = TURNS) -> None:
        self._count = self._left = count  # of this iteration
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        loop = asyncio.get_running_loop()
        if self._left == self._count:
            loop.call_soon(self._next, loop)
        if self._left:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._count
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                self._left -= 1
        if self._left < self._count:
            loop.call_soon(self._next, loop)


def outside_strings(body: bytes) -> Iterator[bytes]:
    """Yield the bytes outside of strings, by slice. Invalid JSON gives arbitrary bytes."""
    in_string, start = False, 0
    while start < len(body):
        end = start + SLICE_BYTES
        while body[end - 1 : end] == b"\\":  # do not split an escape
            end += 1
        bare = body[start:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = bare.split(b'"')
        yield b"".join(pieces[1::2] if in_string else pieces[::2])
        in_string ^= len(pieces) % 2 == 0
        start = end


def check_structure(body: bytes, max_items: int) -> None:
    """Raise ApiError when the body exceeds the item limits. Does not parse it."""
    brackets = body.count(b"[") + body.count(b"{")
    few_fields = body.count(b":") <= MAX_FIELDS
    if few_fields and brackets <= MAX_CONTAINERS and brackets + body.count(b",") <= max_items:
        return  # upper bounds: characters inside strings are counted too
    items = containers = fields = 0
    for outside in outside_strings(body):
        opened = outside.count(b"[") + outside.count(b"{")
        containers += opened
        items += opened + outside.count(b",")
        fields += outside.count(b":")
        for what, count, most in (
            ("items", items, max_items),
            ("lists and objects", containers, MAX_CONTAINERS),
            ("fields", fields, MAX_FIELDS),
        ):
            if count > most:
                raise ApiError(
                    400,
                    f"the body has more than {most} {what}",
                    code="too_many_items",
                )


def read_json(body: bytes) -> Any:
    """Decode UTF-8 JSON; other encodings would evade the item count. Raises ValueError."""
    try:
        return msgspec.json.decode(body)  # several times faster than json
    except ValueError:  # msgspec rejects lone surrogates and a byte order mark
        return json.loads(body.decode("utf-8-sig"))


def parse_body(
    schema: type[BaseModel], body: bytes, max_items: int, notes: FieldNotes | None = None
) -> BaseModel:
    """Parse and validate a body. Raises ApiError. Adds ignored fields to `notes`."""
    check_structure(body, max_items)
    try:
        data = read_json(body)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError:
        raise ApiError(400, "the body is not valid JSON", code="invalid_json") from None
    try:
        return schema.model_validate(data, context=notes)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise validation_error(found, schema.model_fields) from None


class ParsedRequest(Request):
    """A request with a validated body, which FastAPI does not parse again; None: no body."""

    def __init__(self, request: Request, parsed: BaseModel | None) -> None:
        super().__init__(request.scope, request.receive, request._send)
        self._body = b"" if parsed is None else b"parsed"
        self._parsed = parsed

    async def json(self) -> Any:
        return self._parsed


Endpoint = Callable[[Request, BaseModel], Coroutine[Any, Any, Response]]


Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def handler_of(router: APIRouter, path: str) -> Handler:
    """Return the handler of a POST route, for a route that forwards its requests."""
    return next(
        route.get_route_handler()
        for route in router.routes
        if isinstance(route, APIRoute) and route.path == path and "POST" in (route.methods or ())
    )


def plain_endpoint(route: APIRoute) -> Endpoint | None:
    """Return the endpoint if it takes only (request, body) and returns a Response: it can be called
    without FastAPI's dependency resolution. None otherwise."""
    found = inspect.signature(route.endpoint, eval_str=True)
    if list(found.parameters) != ["request", "body"] or found.return_annotation is not Response:
        return None
    return route.endpoint


def is_json(request: Request) -> bool:
    """Whether the Content-Type is JSON; FastAPI rejects other types."""
    given = request.headers.get("content-type", "")
    return given.partition(";")[0].strip().lower() == "application/json"


class CheckedRoute(APIRoute):
    """A route whose body is parsed by `parse_body`, in a thread above INLINE_BYTES."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        plain = plain_endpoint(self)
        schema = self.body_field.field_info.annotation
        assert isinstance(schema, type) and issubclass(schema, BaseModel)

        async def parse_and_handle(request: Request) -> Response:
            body = b"".join([chunk async for chunk in request.stream() if chunk])
            await request.app.state.turns.take()
            service = request.app.state.models.first
            parsed: BaseModel | None = None  # None: FastAPI reports the missing body
            strict = service.config.strict_fields or is_strict_header(
                request.headers.get(STRICT_HEADER)
            )
            notes = request.scope["state"]["field_notes"] = FieldNotes(strict)
            if len(body) > INLINE_BYTES:
                parsed = await service.body_pool.run(
                    parse_body, schema, body, service.max_items, notes
                )
            elif body:
                parsed = parse_body(schema, body, service.max_items, notes)
            del body
            request.scope["state"]["body_parsed"]()
            if parsed is not None and plain is not None and is_json(request):
                return await plain(request, parsed)
            return await handle(ParsedRequest(request, parsed))

        return parse_and_handle


class ProtocolRouter(APIRouter):
    """Routes with one error format, which unknown paths below the prefix have, too.
    `untyped_bodies`: clients send JSON without a Content-Type."""

    def __init__(
        self,
        error_shape: ErrorShape = ApiError.body,
        *,
        untyped_bodies: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(route_class=CheckedRoute, **options)
        self.error_shape, self.untyped_bodies = error_shape, untyped_bodies

    def has_path(self, path: str) -> bool:
        if self.prefix:
            return f"{path}/".startswith(f"{self.prefix}/")
        return any(isinstance(r, APIRoute) and r.path_regex.match(path) for r in self.routes)
