"""From the bytes of a body to its schema: counted before it is parsed, parsed beside the loop.

What JSON costs is its items, not its bytes: a list of two million numbers fits into 4 MB and takes
seconds to check. So the items are counted first, by a few passes of C over the bytes.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from llaisys.server.errors import ApiError
from llaisys.server.http.faults import validation_error
from llaisys.server.openai.fields import FieldNotes

INLINE_BYTES = 16 << 10  # parsed on the event loop: a thread costs more than they do
SLICE_BYTES = 256 << 10  # looked at in one go; other threads run in between
# Lists and objects, and the fields of objects: each costs as much as many numbers.
MAX_CONTAINERS = 16 << 10
MAX_FIELDS = 64 << 10


def outside_strings(body: bytes) -> Iterator[bytes]:
    """What is not inside a string, slice by slice; of a body that is no JSON, anything."""
    in_string, start = False, 0
    while start < len(body):
        end = start + SLICE_BYTES
        while body[end - 1 : end] == b"\\":  # an escape stays in one piece
            end += 1
        bare = body[start:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = bare.split(b'"')
        yield b"".join(pieces[1::2] if in_string else pieces[::2])
        in_string ^= len(pieces) % 2 == 0
        start = end


def check_structure(body: bytes, max_items: int) -> None:
    """Raises ApiError when there is more in the body than may be parsed. Never parses."""
    marks = body.count(b"[") + body.count(b"{")
    few_fields = body.count(b":") <= MAX_FIELDS
    if few_fields and marks <= MAX_CONTAINERS and marks + body.count(b",") <= max_items:
        return  # texts included, so fewer without them
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
    """UTF-8 only: what else `json` takes could hide from the count. Raises ValueError."""
    try:
        return msgspec.json.decode(body)  # several times as fast
    except ValueError:  # halves of characters and a byte order mark are none of its business
        return json.loads(body.decode("utf-8-sig"))


def parse_body(
    schema: type[BaseModel], body: bytes, max_items: int, notes: FieldNotes | None = None
) -> BaseModel:
    """Raises ApiError with what is wrong; `notes` learn what was ignored."""
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
    """A request whose body has been checked; FastAPI takes it as it is. None: there was none."""

    def __init__(self, request: Request, parsed: BaseModel | None) -> None:
        super().__init__(request.scope, request.receive, request._send)
        self._body = b"" if parsed is None else b"parsed"
        self._parsed = parsed

    async def json(self) -> Any:
        return self._parsed


Endpoint = Callable[[Request, BaseModel], Coroutine[Any, Any, Response]]


def plain_endpoint(route: APIRoute) -> Endpoint | None:
    """The route's function, where it takes the request and the body and nothing else, and gives a
    response: FastAPI has nothing to find out for it. None: it has."""
    wants = inspect.signature(route.endpoint, eval_str=True)
    if list(wants.parameters) != ["request", "body"] or wants.return_annotation is not Response:
        return None
    endpoint: Endpoint = route.endpoint
    return endpoint


def is_json(request: Request) -> bool:
    """By its header; what is not, FastAPI refuses."""
    given = request.headers.get("content-type", "")
    return given.partition(";")[0].strip().lower() == "application/json"


class CheckedRoute(APIRoute):
    """A route whose body goes through `parse_body`, in a thread when it is not small."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        plain = plain_endpoint(self)
        schema = self.body_field.field_info.annotation
        assert isinstance(schema, type) and issubclass(schema, BaseModel)

        async def parse_and_handle(request: Request) -> Response:
            body = b"".join([chunk async for chunk in request.stream() if chunk])
            service = request.app.state.models.first
            parsed: BaseModel | None = None  # then FastAPI says what is missing
            notes = FieldNotes(service.config.strict_fields)
            if len(body) > INLINE_BYTES:
                parsed = await service.body_pool.run(
                    parse_body, schema, body, service.max_items, notes
                )
            elif body:
                parsed = parse_body(schema, body, service.max_items, notes)
            del body
            request.scope["state"]["body_parsed"]()
            request.scope["state"]["ignored_fields"] = notes.header
            if parsed is not None and plain is not None and is_json(request):
                return await plain(request, parsed)
            return await handle(ParsedRequest(request, parsed))

        return parse_and_handle
