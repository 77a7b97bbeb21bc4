"""What clients get: OpenAI's response objects, built as plain dictionaries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from llaisys.common.types import CompletionOutput, TokenLogprobs, Usage

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
# A call of the encoder stops every thread for as long as it takes.
LOGPROBS_AT_ONCE = 64  # tokens, each with up to 20 neighbours
PIECE_BYTES = 64 << 10  # of a long body, to send at once


def sse(data: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(data) + b"\n\n"


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


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def add_usage(parts: Sequence[Usage]) -> Usage:
    return Usage(
        sum(usage.prompt_tokens for usage in parts),
        sum(usage.completion_tokens for usage in parts),
        sum(usage.cached_tokens for usage in parts),
    )


class TokenNames:
    """Token ids as the strings that logprobs show."""

    def __init__(self, tokenizer: Any, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        text: str = self._tokenizer.decode_tokens([token_id], skip_special_tokens=False)
        if "\ufffd" in text:  # part of a character: named by its bytes, as OpenAI does
            raw = self._tokenizer.token_bytes(token_id)
            if raw != text.encode():
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return text

    def detokenizer(self) -> Any:
        """Counts the characters that tokens add to a text; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.detokenizer(True)

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """`bytes` are the token's own, which need not be whole characters."""
        raw = None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))
        return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": raw}


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI shows -9999 for "never"."""
    return logprob if logprob > -9999.0 else -9999.0


def chat_logprobs(
    entries: Sequence[TokenLogprobs] | None, names: TokenNames
) -> dict[str, Any] | None:
    if entries is None:
        return None
    content = []
    for entry in entries:
        item = names.entry(entry.token_id, entry.logprob)
        item["top_logprobs"] = [names.entry(token, value) for token, value in entry.top]
        content.append(item)
    return {"content": content, "refusal": None}


class TextOffsets:
    """Where each token of a choice begins in its text; a part of a character where that begins."""

    def __init__(self, names: TokenNames, start: int = 0) -> None:
        self._detokenizer = names.detokenizer()
        self._at = start

    def take(self, token_id: int) -> int:
        at = self._at
        if self._detokenizer is not None:
            self._at += len(self._detokenizer.add(token_id))
        return at


def completion_logprobs(
    entries: Sequence[TokenLogprobs] | None, names: TokenNames, offsets: TextOffsets
) -> dict[str, Any] | None:
    if entries is None:
        return None
    tokens = [names.text(entry.token_id) for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {names.text(token): finite(value) for token, value in entry.top} for entry in entries
        ],
        "text_offset": [offsets.take(entry.token_id) for entry in entries],
    }


@dataclass(frozen=True, slots=True)
class ResponseBuilder:
    """Builds the JSON of one response: a chat's or a completion's, whole or in chunks."""

    response_id: str
    created: int
    model: str
    chat: bool
    names: TokenNames
    token_ids: bool = False  # return_token_ids
    session_id: str | None = None

    def _head(self, chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        head = {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }
        if self.session_id is not None:
            head["session_id"] = self.session_id
        return head

    def _logprobs(
        self, entries: Sequence[TokenLogprobs] | None, offsets: TextOffsets | None
    ) -> Any:
        if self.chat:
            return chat_logprobs(entries, self.names)
        return completion_logprobs(entries, self.names, offsets or TextOffsets(self.names))

    def whole(
        self, choices: Sequence[tuple[int, CompletionOutput, str]], usage: Usage
    ) -> Iterator[bytes]:
        """The body in pieces; choices are (index, output, echo). None takes long to make."""
        head = {**self._head(False), "usage": usage_object(usage)}
        yield json_bytes(head)[:-1] + b',"choices":['
        for number, (index, output, echo) in enumerate(choices):
            if number:
                yield b","
            yield json_bytes(self._choice(index, output, echo))[:-1] + b',"logprobs":'
            yield from self._logprobs_pieces(output.logprobs, TextOffsets(self.names, len(echo)))
            yield b"}"
        yield b"]}"

    def _logprobs_pieces(
        self, entries: Sequence[TokenLogprobs] | None, offsets: TextOffsets
    ) -> Iterator[bytes]:
        """`_logprobs` in JSON, a few tokens at a time: what its lists hold is put together."""
        if entries is None:
            yield b"null"
            return
        columns: dict[str, list[bytes]] = {}
        for start in range(0, max(1, len(entries)), LOGPROBS_AT_ONCE):
            block = self._logprobs(entries[start : start + LOGPROBS_AT_ONCE], offsets)
            for name, column in block.items():
                columns.setdefault(name, []).append(json_bytes(column))
        for number, (name, blocks) in enumerate(columns.items()):
            yield (b"," if number else b"{") + json_bytes(name) + b":"
            if not blocks[0].startswith(b"["):  # not a list: the same in each
                yield blocks[0]
                continue
            for place, text in enumerate(blocks):
                yield (b"," if place else b"[") + text[1:-1]
            yield b"]"
        yield b"}"

    def _choice(self, index: int, output: CompletionOutput, echo: str) -> dict[str, Any]:
        """Without its logprobs."""
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self.chat:
            choice["message"] = {"role": "assistant", "content": output.text, "refusal": None}
        else:
            choice["text"] = echo + output.text
        if self.token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def chunk(
        self,
        index: int,
        text: str,
        *,
        first: bool = False,
        logprobs: Sequence[TokenLogprobs] | None = None,
        offsets: TextOffsets | None = None,
        token_ids: list[int] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(logprobs, offsets),
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        if self.chat:
            delta = {"role": "assistant"} if first else {}
            if text or first:
                delta["content"] = text
            choice["delta"] = delta
        else:
            choice["text"] = text
        if self.token_ids and token_ids is not None:
            choice["token_ids"] = token_ids
        return {**self._head(True), "choices": [choice]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._head(True), "choices": [], "usage": usage_object(usage)}
