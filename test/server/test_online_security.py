"""Attacks on the HTTP API: endless bodies, invalid ids, exact limits, routes without a key, leaking
errors, URLs in messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_helpers import CANARY, CHAT, KEYS, TELLING, chat, error_of
from server_helpers import LONG, ServerProcess, resident
from wire_helpers import raw_request, read_to_end, reset

from llaisys.common.logs import JsonFormatter, TextFormatter
from llaisys.server.http.middleware import RequestContext
from llaisys.server.http.protocol import LINGER_BYTES

COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}


# ---- bodies without an end -----------------------------------------------------------------------

HEAD = (
    f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    f"Authorization: Bearer {KEYS[0]}\r\n"
).encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
CUT_OFF = 2 * LINGER_BYTES  # the kernel buffers some megabytes before a reset is seen


@pytest.mark.parametrize(
    ("start", "piece", "status"),
    [
        (CHUNKED, b"8000\r\n" + b" " * 0x8000 + b"\r\n", 413),
        (HEAD + b"Content-Length: 10000000000\r\n\r\n", b" " * 0x8000, 413),
        (CHUNKED + b"0\r\n", b"X-Trailer: " + b"y" * 1000 + b"\r\n", 431),
        (CHUNKED + b"0\r\nX-Trailer: ", b"y" * 0x8000, 431),
        (CHUNKED + b"1;", b"extension" * 1000, 431),
        (HEAD + b"X-Endless: ", b"y" * 0x8000, 431),
    ],
    ids=["chunks", "length", "trailers", "one trailer", "chunk extension", "one header"],
)
def test_endless_requests_are_cut_off_without_memory_growth(
    server: ServerProcess, start: bytes, piece: bytes, status: int
) -> None:
    before, sent = resident(server.process.pid), 0
    with server.connect() as connection:
        connection.sendall(start)
        received = b""
        try:
            batch = piece * (0x10000 // len(piece) + 1)
            while sent < CUT_OFF:
                connection.sendall(batch)
                sent += len(batch)
        except OSError:  # at last
            pass
        else:
            raise AssertionError(f"{sent} bytes were taken")
        with contextlib.suppress(OSError):
            received = read_to_end(connection)
    # A reset may arrive before the response.
    assert not received or received.startswith(b"HTTP/1.1 %d" % status), received[:200]
    assert resident(server.process.pid) - before < 16 << 20
    with server.client() as client:
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_client_that_sends_too_much_reads_the_413(server: ServerProcess, framing: str) -> None:
    """Also one that reads only after it has sent all."""
    size, piece = 24 << 20, b" " * (1 << 20)
    with server.connect() as connection:
        if framing == "length":
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % size)
        else:
            connection.sendall(CHUNKED)
        for _ in range(size // len(piece)):
            connection.sendall(piece if framing == "length" else b"100000\r\n" + piece + b"\r\n")
        if framing == "chunked":
            connection.sendall(b"0\r\n\r\n")
        received = connection.recv(1 << 16)
        assert received.startswith(b"HTTP/1.1 413") and b"body_too_large" in received
        assert connection.recv(1 << 16) == b""  # the end of the stream, not a reset


# ---- numbers -------------------------------------------------------------------------------------


JUNK = ["NaN", "Infinity", "-Infinity", "1e999", "true", '"1"', "null", "[1]"]  # as JSON
JUNK_IDS = [*JUNK, "-1", "512", "1.5", *[str(1 << bits) for bits in (31, 63, 64)]]


@pytest.mark.parametrize("value", JUNK_IDS)
def test_invalid_token_ids_are_rejected_everywhere(client: httpx.Client, value: str) -> None:
    for path, body in (
        (COMPLETIONS, '{"prompt": [1, %s]}'),
        (COMPLETIONS, '{"prompt": [[1], [%s]]}'),
        (COMPLETIONS, '{"prompt": "x", "stop_token_ids": [%s]}'),
        (COMPLETIONS, '{"prompt": "x", "allowed_token_ids": [%s]}'),
        (CHAT, '{"messages": [{"role": "user", "content": "x"}], "stop_token_ids": [%s]}'),
        ("/detokenize", '{"tokens": [1, %s]}'),
    ):
        response = client.post(path, content=body % value, headers=JSON)
        error_of(response, 400)


@pytest.mark.parametrize("bias", [*JUNK, "101", "-101", str(1 << 64)])
def test_non_numeric_biases_are_rejected(client: httpx.Client, bias: str) -> None:
    content = f'{{"prompt": "x", "logit_bias": {{"5": {bias}}}}}'
    error = error_of(client.post(COMPLETIONS, content=content, headers=JSON), 400)
    assert "logit_bias" in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "cap", "make"),
    [
        (CHAT, "n", 128, int),
        (CHAT, "top_logprobs", 20, int),
        (COMPLETIONS, "logprobs", 20, int),
        (COMPLETIONS, "n", 128, int),
        (COMPLETIONS, "prompt", 64, lambda count: ["x"] * count),
        (CHAT, "stop", 64, lambda count: [f"~{i}~" for i in range(count)]),
        (CHAT, "stop", 1024, lambda length: "~" * length),
        (CHAT, "bad_words", 256, lambda count: [f"~{i}" for i in range(count)]),
        (CHAT, "stop_token_ids", 1024, lambda count: [i % 512 for i in range(count)]),
        (CHAT, "cache_salt", 1024, lambda length: "s" * length),
    ],
)
def test_limits_are_exact(client: httpx.Client, path: str, field: str, cap: int, make: Any) -> None:
    """The limit itself is accepted; anything above is rejected with the field name."""
    base = chat(max_tokens=1) if path == CHAT else {"prompt": "x", "max_tokens": 1}
    if field == "top_logprobs":
        base["logprobs"] = True
    assert client.post(path, json={**base, field: make(cap)}).status_code == 200
    above = [cap + 1, *([1 << 31, 1 << 63, 1 << 70] if make is int else [cap * 2])]
    for number in above:
        error = error_of(client.post(path, json={**base, field: make(number)}), 400)
        assert field in error["message"] or error["param"] == field
        if "logprobs" in field and number >= 1 << 31:  # above any value of --max-logprobs
            continue
        assert str(cap) in error["message"], error


# ---- access --------------------------------------------------------------------------------------

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
OTHER_PATHS = """
    /v1 /v1/ //v1/models /v1//models /v1/models/ /V1/models /v1/models?x=/health /%76%31/models
    /v1%2fmodels /health/ /health/../v1/models /health%2f..%2fv1/models /./v1/models /v1/models%00
    /v1/models;/health /health%00 /docs /redoc /openapi.json /metrics /app.js/../metrics
""".split()


def test_no_method_or_path_spelling_bypasses_the_key(
    server: ServerProcess, client: httpx.Client
) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    routes = [
        path.replace("{", "").replace("}", "")
        for path in paths
        if path not in ("/health", "/live", "/ping", "/ready")
    ]
    assert len(routes) >= 12
    with server.client() as anonymous:

        def status(method: str, path: str) -> int:
            """Return the status of a raw request target, not normalized by a client."""
            request = anonymous.build_request(method, "/", content=b"{}", headers=JSON)
            request.url = request.url.copy_with(raw_path=path.encode())
            return anonymous.send(request).status_code

        assert status("GET", "/health") == 200
        for path in (*routes, *OTHER_PATHS):
            for method in METHODS:
                assert status(method, path) == 401, (method, path)


def test_public_address_without_key_logs_a_warning(tmp_path: Path) -> None:
    def warnings(*options: str) -> list[str]:
        session = tmp_path / "s.db"
        with ServerProcess("--host", "0.0.0.0", *options, session_file=session) as server:
            server.wait_ready()
        return [e["message"] for e in server.events() if e["level"] == "warning"]

    assert any("without an API key" in text for text in warnings())
    assert warnings("--api-key", "k") == []


def test_urls_in_messages_are_not_fetched(client: httpx.Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as inside:
        inside.setblocking(False)
        url = f"http://127.0.0.1:{inside.getsockname()[1]}/latest/meta-data"
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "input_audio", "input_audio": {"url": url}},
            {"type": "file", "file": {"file_url": url}},
        ):
            error_of(
                client.post(CHAT, json=chat(messages=[{"role": "user", "content": [part]}])), 400
            )
        assert client.post(CHAT, json=chat(messages=[{"role": "user", "content": url}])).is_success
        with pytest.raises(BlockingIOError):
            inside.accept()


# ---- contents of errors --------------------------------------------------------------------------


def error_requests() -> Iterator[tuple[str, str, Any, dict[str, str]]]:
    """Yield (method, path, body, headers) of invalid requests with a text that must not leak."""
    messages = [{"role": "user", "content": CANARY}]
    for fields in (
        {"n": 0}, {"temperature": CANARY}, {"stop": 5}, {"logit_bias": {CANARY: 1}}, {"model": 5},
        {"max_tokens": 1 << 40}, {"response_format": CANARY},
        {"tools": [{"type": CANARY}], "tool_choice": {"type": CANARY}},
        {"chat_template": CANARY}, {"session_id": CANARY + "/"}, {"messages": [{"role": CANARY}]},
        {"messages": [{"role": "user", "content": {"text": CANARY}}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": CANARY}]}]},
        {"messages": [{"role": "user", "content": CANARY * 1000}]},
        {"continue_final_message": True},
    ):  # fmt: skip
        yield "POST", CHAT, json.dumps({**chat(messages=messages), **fields}), JSON
    yield "POST", COMPLETIONS, json.dumps({"prompt": CANARY * 1000}), JSON
    yield "POST", COMPLETIONS, json.dumps({"prompt": [CANARY, 1]}), JSON
    yield "POST", COMPLETIONS, f'{{"prompt": "{CANARY}', JSON
    yield "POST", COMPLETIONS, b'{"prompt": "\xff%s"}' % CANARY.encode(), JSON
    yield "POST", COMPLETIONS, json.dumps({"prompt": CANARY}), {"Content-Type": "text/plain"}
    yield "POST", COMPLETIONS, " " * 100_001, JSON
    yield "POST", "/tokenize", json.dumps({"prompt": CANARY, "messages": messages}), JSON
    yield "POST", "/detokenize", json.dumps({"tokens": [CANARY]}), JSON
    yield "POST", f"/v1/requests/{CANARY}/cancel", "", {}
    yield "GET", f"/v1/sessions/{CANARY}", "", {}
    yield "GET", f"/{CANARY}", "", {}
    yield "PUT", CHAT, CANARY, JSON
    yield "GET", "/v1/models", "", {"Authorization": f"Bearer {CANARY}"}
    yield "GET", "/v1/models", "", {"Host": f"{CANARY}.example"}
    yield "POST", CHAT, json.dumps(chat()), {**JSON, "Origin": f"https://{CANARY}.example"}


def test_errors_do_not_leak_client_text(client: httpx.Client, server: ServerProcess) -> None:
    statuses = set()
    for method, path, body, headers in error_requests():
        response = client.request(method, path, content=body, headers=headers)
        assert response.status_code >= 400, (method, path, body[:200])
        statuses.add(response.status_code)
        error_of(response, response.status_code)
        assert not TELLING.search(response.text), (path, response.text)
    assert statuses >= {400, 401, 403, 404, 405, 413, 415}
    assert not any(CANARY in line for line in server.log)


def test_internal_error_is_a_500_without_details() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError(f"{CANARY} at 0x7f00deadbeef in /root/model")

    async def run() -> httpx.Response:
        app = RequestContext(broken, lambda *_: None)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/")

    response = asyncio.run(run())
    assert error_of(response, 500)["message"] == "internal error"
    assert not TELLING.search(response.text)


def test_status_routes_show_no_request_content(client: httpx.Client, server: ServerProcess) -> None:
    running = raw_request(
        server, {**LONG, "prompt": CANARY, "user": CANARY}, Authorization=f"Bearer {KEYS[0]}"
    )
    server.wait_for(lambda: server.metric("num_requests_running", KEYS[0]) == 1, "the request")
    for path in ("/metrics", "/health", "/ready", "/version", "/v1/models", "/v1/sessions"):
        assert CANARY not in client.get(path).text, path
    reset(running)
    server.wait_idle(KEYS[0])


def test_client_text_cannot_forge_log_fields_or_lines() -> None:
    fields = {
        "path": "/v1/models",
        "user": "me status=200",
        "agent": "a\n12:00:00 INFO llaisys.server: request status=200\x1b[31m\u2028x",
        "quoted": 'a"b',
        "status": 400,
    }
    record = logging.makeLogRecord({"msg": "request", "levelname": "INFO", "fields": fields})
    line = TextFormatter().format(record)
    assert line.isprintable()
    words = shlex.split(line)
    assert words[-5:][:2] == ["path=/v1/models", "user=me status=200"]
    assert words[-2:] == ['quoted=a"b', "status=400"]
    line = JsonFormatter().format(record)
    assert "\n" not in line and json.loads(line)["agent"] == fields["agent"]
