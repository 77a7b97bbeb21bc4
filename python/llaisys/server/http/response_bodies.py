"""Encode JSON bodies and server-sent events."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.decode

CHUNK_BYTES = 64 << 10  # of a long body, per send


def sse(data: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(data) + b"\n\n"


def named_event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json_bytes(data) + b"\n\n"


def json_bytes(data: Any) -> bytes:
    try:
        return _encode(data)
    except UnicodeEncodeError:  # a lone surrogate from the client
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=_decode)
        return text.encode("utf-8", "replace")


def encoded(data: Any) -> msgspec.Raw:
    """A part of a JSON value that is encoded once and copied by `json_bytes`."""
    return msgspec.Raw(json_bytes(data))


def json_response(data: Any) -> Response:
    return Response(json_bytes(data), media_type="application/json")


class LongResponse(Response):
    """A body sent in chunks, so that a slow client applies back-pressure."""

    def __init__(self, chunks: list[bytes]) -> None:
        super().__init__(media_type="application/json")
        self.chunks = chunks
        self.headers["content-length"] = str(sum(len(chunk) for chunk in chunks))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def body_response(chunks: list[bytes]) -> Response:
    if len(chunks) == 1:
        return Response(chunks[0], media_type="application/json")
    return LongResponse(chunks)


def join_chunks(pieces: Iterator[bytes]) -> list[bytes]:
    """Join the bytes to chunks of about CHUNK_BYTES."""
    chunks, pending, size = [], [], 0
    for piece in pieces:
        pending.append(piece)
        size += len(piece)
        if size >= CHUNK_BYTES:
            chunks.append(b"".join(pending))
            pending, size = [], 0
    return [*chunks, b"".join(pending)] if pending else chunks
