"""JSON of long answers is encoded in small pieces, because the encoder holds the GIL; the joined
pieces equal one encoding."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from typing import Any

import pytest
from engine_fakes import FakeTokenizer

from llaisys.chat.reader import AnswerReader
from llaisys.common.request import RequestStatus
from llaisys.common.types import (
    CompletionOutput,
    RequestOutput,
    StreamOutput,
    TokenLogprobs,
    Usage,
)
from llaisys.server.engine_client.deltas import MERGED_LOGPROBS, merge_deltas
from llaisys.server.generation.token_names import TokenNames
from llaisys.server.http import response_bodies as payload
from llaisys.server.http.response_bodies import (
    CHUNK_BYTES,
    LongResponse,
    body_response,
    join_chunks,
)
from llaisys.server.openai.response_objects import (
    Choice,
    ResponseBuilder,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
)
from llaisys.server.responses.formatter import ResponsesFormatter
from llaisys.server.responses.schemas import ResponsesRequest

NAMES = TokenNames(FakeTokenizer())


def entries(count: int, top: int = 20) -> list[TokenLogprobs]:
    return [
        TokenLogprobs.of(97 + i % 20, -i / 7, 1, [(97 + j, -float(j)) for j in range(top)])
        for i in range(count)
    ]


def output(index: int, logprobs: list[TokenLogprobs] | None, text: str) -> CompletionOutput:
    return CompletionOutput(
        index, text, [1, 2], "stop", "END", RequestStatus.FINISHED_STOPPED, logprobs
    )


def builder(chat: bool, token_ids: bool = False) -> ResponseBuilder:
    return ResponseBuilder("id", 7, "m", chat, NAMES, token_ids, "sess")


@pytest.mark.parametrize("count", [None, 0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("chat", [True, False])
def test_chunked_body_equals_single_body(chat: bool, count: int | None) -> None:
    logprobs = None if count is None else entries(count)
    outputs = [output(0, logprobs, "a\ud800é"), output(1, logprobs, "")]
    echo = "" if chat else "so"
    pieces = join_chunks(
        builder(chat, True).whole([Choice(o.index, o, echo) for o in outputs], Usage(3, 4), {})
    )
    body = json.loads(b"".join(pieces))
    assert (body["id"], body["model"], body["session_id"]) == ("id", "m", "sess")
    assert body["usage"]["total_tokens"] == 7
    expected: Any = (
        chat_logprobs(logprobs, NAMES)
        if chat
        else completion_logprobs(logprobs, NAMES, TextOffsets(NAMES, len(echo)))
    )
    for choice, made in zip(body["choices"], outputs, strict=True):
        assert choice["index"] == made.index and choice["logprobs"] == expected
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
        assert choice["token_ids"] == [1, 2]
        shown = made.text.replace("\ud800", "?")
        assert (choice["message"]["content"] if chat else choice["text"]) == echo + shown


@pytest.mark.parametrize("chat", [True, False])
def test_encoder_calls_are_short(monkeypatch: pytest.MonkeyPatch, chat: bool) -> None:
    sizes = []
    encode = payload._encode

    def measured(data: Any) -> bytes:
        written = encode(data)
        sizes.append(len(written))
        return written

    monkeypatch.setattr(payload, "_encode", measured)
    pieces = join_chunks(
        builder(chat).whole([Choice(0, output(0, entries(5000), "x"))], Usage(1, 5000), {})
    )
    total = sum(len(piece) for piece in pieces)
    assert total > 10 * CHUNK_BYTES and max(sizes) < 3 * CHUNK_BYTES
    assert max(len(piece) for piece in pieces) < 4 * CHUNK_BYTES


def test_long_body_is_sent_in_chunks_with_content_length() -> None:
    pieces = [b"a" * 10, b"b" * 5]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is to be received")

    response = body_response(pieces)
    assert isinstance(response, LongResponse)
    asyncio.run(response({"type": "http"}, receive, send))
    headers = dict(sent[0]["headers"])
    assert headers[b"content-length"] == b"15"
    assert headers[b"content-type"] == b"application/json"
    assert [message["body"] for message in sent[1:]] == [*pieces, b""]
    assert [message["more_body"] for message in sent[1:]] == [True, True, False]
    assert not isinstance(body_response(pieces[:1]), LongResponse)


def test_slow_reader_gets_merged_deltas_with_few_logprobs() -> None:
    def parts(logprobs: bool) -> deque[StreamOutput]:
        return deque(
            StreamOutput("r", 0, "x", [97], None, entries(1) if logprobs else None)
            for _ in range(1000)
        )

    backlog, counts = parts(True), []
    while backlog:
        part = merge_deltas(backlog)
        counts.append(len(part.token_ids))
        assert part.logprobs is not None and len(part.logprobs) == len(part.token_ids)
    assert sum(counts) == 1000 and max(counts) == MERGED_LOGPROBS
    assert merge_deltas(parts(False)).text == "x" * 1000


def test_events_that_repeat_all_logprobs_copy_their_encoding() -> None:
    """The last events of a long answer of /v1/responses: 20 ms of CPU time each at most, where
    encoding takes 100 ms."""
    count = 5000
    body = ResponsesRequest.model_validate({"input": "hi", "top_logprobs": 20, "stream": True})
    formatter = ResponsesFormatter(AnswerReader(), body, "m", {}, "r", False, NAMES, 1)
    made = entries(count)
    sent = b"".join(
        event
        for entry in made
        for event in formatter.format_delta(0, StreamOutput("r", 0, "a", [97], None, [entry]))
    )
    assert sent.count(b'"top_logprobs":[{') == count
    whole = RequestOutput("r", None, [1], [output(0, made, "a" * count)], Usage(1, count))
    last = iter(formatter.format_delta(0, StreamOutput("r", 0, "", [], "stop", None, None, whole)))
    seconds, events, start = [], [], time.thread_time()
    for event in last:
        seconds.append(time.thread_time() - start)
        events.append(json.loads(event.partition(b"data: ")[2]))
        start = time.thread_time()
    assert [event["type"] for event in events] == [
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.completed"),
    ]
    expected: Any = chat_logprobs(made, NAMES)
    assert events[0]["logprobs"] == expected["content"]
    assert events[3]["response"]["output"][0]["content"][0]["logprobs"] == expected["content"]
    assert max(seconds) < 0.02, seconds
