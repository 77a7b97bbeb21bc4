"""Internal errors: OpenAI's error object, the details in log and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
import zmq
from fault_server import INLINE_CHARS, PANIC, UNTOUCHABLE, PanicException
from http_helpers import CHAT, chat, error_of
from server_helpers import LONG, Gate, ServerProcess
from wire_helpers import raw_request, reset

from llaisys.common.logs import JsonFormatter, TextFormatter
from llaisys.processes.channel import encode
from llaisys.server.config import ServerConfig
from llaisys.server.engine_client.link import EngineLink
from llaisys.server.engine_client.messages import Rejected


@pytest.mark.parametrize("text", [UNTOUCHABLE, PANIC, PANIC + "!" * INLINE_CHARS])
@pytest.mark.parametrize("stream", [False, True])
def test_internal_error_is_a_500_and_logged(
    server: ServerProcess, client: httpx.Client, text: str, stream: bool
) -> None:
    """A panic in a Rust library is not an `Exception`; on the event loop or in a thread."""
    body = {"prompt": text, "stream": stream}
    answer = client.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "application/json"
    error = error_of(answer, 500)
    assert (error["message"], error["code"]) == ("internal error", "internal_error")

    def logged() -> list[dict[str, Any]]:
        events = server.events()
        return [event for event in events if event.get("request_id") == error["request_id"]]

    server.wait_for(lambda: bool(logged()), "the request's line")
    assert [event["status"] for event in logged()] == [500]
    assert logged()[0]["error"] == "internal_error"
    assert client.post(CHAT, json=chat()).status_code == 200


def test_disconnects_are_counted_as_abort(tmp_path: Path) -> None:
    """Whole or streamed, before the first token or after it."""
    gate = Gate(tmp_path)
    with ServerProcess(env=gate.env, session_file=tmp_path / "s.db") as server:
        server.wait_ready()
        for stream, disconnect in (
            (s, h) for s in (False, True) for h in (socket.socket.close, reset)
        ):
            gate.order("wait")
            connection = raw_request(server, {**LONG, "n": 2, "stream": stream})
            gate.hold()  # the engine has it
            disconnect(connection)
            server.wait_for(lambda: server.num_connections == 0, "the disconnect to be noticed")
            gate.open()
            server.wait_idle()
        running = raw_request(server, {**LONG, "stream": True})
        assert running.recv(1 << 16).startswith(b"HTTP/1.1 200")  # with its first token
        running.close()
        server.wait_idle()
        server.wait_for(lambda: reasons(server) == {"abort": 9.0}, "nine aborts", 10)


def reasons(server: ServerProcess) -> dict[str, float]:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    found = {}
    for line in lines:
        if line.startswith("llaisys:request_success_total{"):
            reason = line.partition('finished_reason="')[2].partition('"')[0]
            found[reason] = float(line.rsplit(" ", 1)[1])
    return found


HIDDEN = "a\nb\rc\u2028d\u2029e\x85f\x9bg\x1b[2Jh\u202ei\u2066j\x00k"


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_client_text_cannot_break_log_lines(formatter: logging.Formatter) -> None:
    """As a field, in a message, in the text of an exception."""
    try:
        raise ValueError(HIDDEN.replace("\n", ""))
    except ValueError:
        info = sys.exc_info()
    record = logging.LogRecord("llaisys", logging.INFO, "f", 1, "message %s", (HIDDEN,), info)
    record.fields = {"user": HIDDEN, "param": HIDDEN}
    text = formatter.format(record)
    first, *rest = text.split("\n")
    assert not any(c in text for c in "\r\u2028\u2029\x85\x9b\x1b\u202e\u2066\x00\x7f")
    assert text.splitlines() == [first, *rest]
    if isinstance(formatter, JsonFormatter):
        assert rest == [] and json.loads(first)["user"] == HIDDEN
    else:
        assert "user=" in first and rest[0].startswith("Traceback")


@pytest.mark.parametrize("error", [ValueError("a bug"), PanicException("a panic")])
def test_unhandled_engine_message_kills_the_engine_with_a_reason(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """Otherwise the receive task would end and every request would wait forever."""
    reasons: list[str] = []

    def fail(message: object) -> None:
        raise error

    class Frames:
        async def recv(self, flags: int = 0) -> bytes:
            if flags:
                raise zmq.Again
            return encode(Rejected("group", ["r"], "no"))

    async def receive() -> None:
        link = EngineLink(ServerConfig(), MagicMock(), fail, reasons.append)
        link._receive_socket = Frames()  # type: ignore[assignment]
        task = asyncio.create_task(link._receive())
        while not reasons:
            await asyncio.sleep(0.001)
        task.cancel()
        link._context.term()

    asyncio.run(asyncio.wait_for(receive(), 10))
    assert len(reasons) == 1 and str(error) in reasons[0]
    assert "could not be handled; its requests: ['r']" in caplog.text
