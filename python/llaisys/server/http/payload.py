"""JSON bodies and events as bytes: what every answer is made of, whatever its shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

_encode = msgspec.json.Encoder().encode

PIECE_BYTES = 64 << 10  # of a long body, to send at once


def sse(data: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(data) + b"\n\n"


def named_event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json_bytes(data) + b"\n\n"


def json_bytes(data: Any) -> bytes:
    try:
        return _encode(data)
    except UnicodeEncodeError:  # a lone surrogate that a client sent
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "replace"
        )


def json_response(data: Any) -> Response:
    return Response(json_bytes(data), media_type="application/json")


class LongResponse(Response):
    """A body in pieces, each sent when the client has taken the ones before."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__(media_type="application/json")
        self.pieces = pieces
        self.headers["content-length"] = str(sum(len(piece) for piece in pieces))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def body_response(pieces: list[bytes]) -> Response:
    if len(pieces) == 1:
        return Response(pieces[0], media_type="application/json")
    return LongResponse(pieces)


def gather(pieces: Iterator[bytes]) -> list[bytes]:
    """The same bytes in pieces of about PIECE_BYTES."""
    found, waiting, size = [], [], 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES:
            found.append(b"".join(waiting))
            waiting, size = [], 0
    return [*found, b"".join(waiting)] if waiting else found
