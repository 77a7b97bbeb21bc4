"""Clients that read slowly or not at all, or never finish a request, over real sockets: they are
disconnected after the configured time and do not affect others."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from engine_fakes import FakeTokenizer, expected_tokens
from fault_engine import STEP_SECONDS
from server_helpers import LONG, ServerProcess, resident
from wire_helpers import post_bytes, raw_events, raw_request, read_to_end, reset

PATH = "/v1/completions"
KEY = "key"
SEND_SECONDS, HEAD_SECONDS, BODY_SECONDS = 1.5, 1.0, 1.5
SMALL = 2048  # bytes of receive buffer
# About 8 kB per step, so that the buffers of a client that does not read fill soon; 9 s in all.
WIDE: dict[str, Any] = {**LONG, "n": 4, "logprobs": 20, "max_tokens": 1800, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(
        "--max-num-seqs", "64", "--api-key", KEY,
        "--send-timeout", str(SEND_SECONDS), "--header-timeout", str(HEAD_SECONDS),
        "--body-timeout", str(BODY_SECONDS),
        env={STEP_SECONDS: "0.005"},
        session_file=tmp_path_factory.mktemp("slow") / "s.db",
    ) as process:  # fmt: skip
        yield process.wait_ready()


def ask(server: ServerProcess, body: dict[str, Any], **headers: str) -> socket.socket:
    """Send a request without reading the response."""
    return raw_request(server, body, SMALL, Authorization=f"Bearer {KEY}", **headers)


def log_of(server: ServerProcess, name: str, message: str = "request") -> list[dict[str, Any]]:
    """Return the log lines of a request with this message."""
    found = [event for event in server.events() if event.get("request_id") == name]
    return [event for event in found if event["message"] == message]


# ---- readers -------------------------------------------------------------------------------------


def test_clients_that_do_not_read_are_disconnected_and_cancelled(
    server: ServerProcess, client: httpx.Client
) -> None:
    """Reading nothing or a byte now and then, streamed or whole: no data accumulates."""
    api, sizes = server.process.pid, []
    for wave in range(2):
        stalled = [ask(server, WIDE, X_Request_Id=f"stalled-{wave}-{i}") for i in range(3)]
        dripping = ask(server, WIDE, X_Request_Id=f"dripping-{wave}")
        whole = ask(server, {**WIDE, "stream": False, "max_tokens": 150, "n": 16})
        stop = threading.Event()

        def drip(connection: socket.socket = dripping, stop: threading.Event = stop) -> None:
            with contextlib.suppress(ConnectionResetError):
                while not stop.wait(0.1) and connection.recv(1):
                    pass

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            for _ in range(5):  # the others are served meanwhile
                assert client.post(PATH, json={"prompt": "x"}).status_code == 200
            server.wait_for(lambda: server.num_connections == 1, "only the quick one to be left")
        finally:
            stop.set()
            thread.join()
        server.wait_idle(KEY)  # long before 1800 steps
        for name in [f"stalled-{wave}-{i}" for i in range(3)] + [f"dripping-{wave}"]:
            server.wait_for(lambda name=name: bool(log_of(server, name)), f"the end of {name}")
            assert log_of(server, name)[0]["finish_reason"] == "abort"
            assert len(log_of(server, name, "a client read nothing and was disconnected")) == 1
        for connection in [*stalled, dripping, whole]:
            assert b"[DONE]" not in read_to_end(connection)
            connection.close()
        sizes.append(resident(api))
    assert sizes[-1] - sizes[0] < 16 << 20, sizes


def test_slow_steady_reader_gets_everything(server: ServerProcess) -> None:
    """Reads slower than the engine writes, for longer than the timeout."""
    body = {**WIDE, "n": 1, "max_tokens": 600, "return_token_ids": True}
    connection = ask(server, body, Connection="close")
    received, rest = b"", 0
    while chunk := connection.recv(16 << 10):
        received += chunk
        rest += len(chunk)
        if rest > 16 << 10:
            rest = 0
            time.sleep(0.05)
    connection.close()
    events = raw_events(received)
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    tokens = [token for choice in choices for token in choice.get("token_ids", [])]
    assert tokens == expected_tokens(FakeTokenizer().encode("long"), 600, stops=())


def test_client_that_does_not_read_delays_no_other(tmp_path: Any) -> None:
    """Other clients are served during the minute before it is disconnected."""
    with ServerProcess("--max-num-seqs", "64", session_file=tmp_path / "s.db") as server:
        server.wait_ready()
        body = {**WIDE, "n": 2, "max_tokens": 400}
        stalled = [raw_request(server, body, SMALL) for _ in range(4)]
        for connection in stalled:
            assert connection.recv(1) == b"H"
        server.wait_idle()  # generation is complete; the buffers are full
        with server.client() as client:
            for number in range(10):
                body = {"prompt": f"n {number}", "max_tokens": 4, "return_token_ids": True}
                answer = client.post(PATH, json={**body, "temperature": 0, "ignore_eos": True})
                tokens = expected_tokens(FakeTokenizer().encode(f"n {number}"), 4, stops=())
                assert answer.json()["choices"][0]["token_ids"] == tokens
        # None of them has received everything or been disconnected.
        assert server.num_connections >= 4
        assert not [event for event in server.events() if event.get("stream")]
        for connection in stalled:
            reset(connection)
        server.wait_idle()


# ---- requests that never end ---------------------------------------------------------------------

HEAD = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
AUTH = HEAD + f"Authorization: Bearer {KEY}\r\n".encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"

# name: (initial bytes, bytes repeated forever, expected response)
ENDLESS: dict[str, tuple[bytes, bytes, bytes]] = {
    "nothing": (b"", b"", b"HTTP/1.1 408"),
    "half of the request line": (b"GET /hea", b"", b"HTTP/1.1 408"),
    "a request line that goes on": (b"GET /", b"a", b"HTTP/1.1 408"),
    "half of the headers": (HEALTH + b"X-Half: ", b"", b"HTTP/1.1 408"),
    "headers that go on": (HEALTH + b"X-Long: ", b"a", b"HTTP/1.1 408"),
    "a second head that goes on": (HEALTH + b"\r\nGET /", b"a", b"HTTP/1.1 200"),
    "half of a second head": (HEALTH + b"\r\nGET /", b"", b"HTTP/1.1 200"),
    "empty lines": (HEALTH + b"\r\n", b"\r\n", b"HTTP/1.1 200"),
    "no body": (AUTH + b"Content-Length: 500\r\n\r\n", b"", b"HTTP/1.1 408"),
    "half of a body": (AUTH + b"Content-Length: 500\r\n\r\n{", b"", b"HTTP/1.1 408"),
    "a body that goes on": (AUTH + b"Content-Length: 500\r\n\r\n{", b" ", b"HTTP/1.1 408"),
    "chunks that go on": (
        AUTH + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", b"HTTP/1.1 408"
    ),
    "an unexpected body": (
        HEALTH + b"Content-Length: 500\r\n\r\n", b"x", b"HTTP/1.1 200"
    ),
    "a body without a valid key": (
        HEAD + b"Content-Length: 500\r\n\r\n", b"x", b"HTTP/1.1 401"
    ),
    "chunks without a valid key": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", b"HTTP/1.1 401"
    ),
    "trailers that go on": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n", b"HTTP/1.1 401"
    ),
}  # fmt: skip


def test_endless_requests_time_out(server: ServerProcess, client: httpx.Client) -> None:
    client.get("/health")  # its connection is kept
    start = time.monotonic()
    open_ones: list[tuple[str, socket.socket]] = []
    for name, (first, _, _) in ENDLESS.items():
        for _ in range(4):
            connection = server.connect()
            connection.sendall(first)
            open_ones.append((name, connection))
    answers: dict[str, list[bytes]] = {name: [] for name in ENDLESS}
    received = {connection: b"" for _, connection in open_ones}
    served = 0
    while open_ones:
        assert time.monotonic() - start < 60, [name for name, _ in open_ones]
        assert client.post(PATH, json={"prompt": "x", "max_tokens": 1}).status_code == 200
        served += 1
        for name, connection in list(open_ones):
            more, over = trickle(connection, ENDLESS[name][1])
            received[connection] += more
            if over:
                assert time.monotonic() - start > HEAD_SECONDS * 0.9, f"{name}: too early"
                answers[name].append(received[connection])
                open_ones.remove((name, connection))
                connection.close()
        time.sleep(0.05)
    for name, (_, _, expected) in ENDLESS.items():
        assert all(answer.startswith(expected) for answer in answers[name]), (name, answers[name])
    assert served > 1
    server.wait_for(lambda: server.num_connections == 1, "no other socket to be left")


def trickle(connection: socket.socket, piece: bytes) -> tuple[bytes, bool]:
    """Send more bytes; return the received data and whether the server closed."""
    connection.setblocking(False)
    received = b""
    try:
        if piece:
            connection.send(piece)
        while chunk := connection.recv(1 << 16):
            received += chunk
        return received, True
    except BlockingIOError:
        return received, False
    except (ConnectionResetError, BrokenPipeError):
        with contextlib.suppress(OSError):
            received += connection.recv(1 << 16)
        return received, True


def test_pipelined_bytes_do_not_end_a_request(server: ServerProcess) -> None:
    """A request is not limited by the header timeout of the next one."""
    body = {**LONG, "max_tokens": round(1.5 * HEAD_SECONDS / 0.005)}  # steps of 5 ms
    with server.connect() as connection:
        connection.sendall(post_bytes(body, Authorization=f"Bearer {KEY}") + b"\r\nGET /he")
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 200") and b'"finish_reason":"length"' in answer
    assert b"HTTP/1.1 408" in answer  # the second one, afterwards


@pytest.mark.parametrize("how", ["close", "half-close"])
def test_pipelined_requests_end_when_the_client_disconnects(
    server: ServerProcess, how: str
) -> None:
    """A pipelined request must not hide the disconnect."""
    body, key = {**LONG, "prompt": "first"}, f"Bearer {KEY}"
    names = [f"{how}-1", f"{how}-2"]
    with server.connect() as connection:
        for name in names:
            connection.sendall(post_bytes(body, Authorization=key, X_Request_Id=name))
        server.wait_for(lambda: server.metric("num_requests_running", KEY) == 1, "the first")
        if how == "half-close":
            connection.shutdown(socket.SHUT_WR)
            assert read_to_end(connection) == b""
    server.wait_idle(KEY)
    server.wait_for(lambda: bool(log_of(server, names[0])), "the end of the first")
    assert log_of(server, names[0])[0]["disconnected"] is True
    assert not log_of(server, names[1])  # never started
