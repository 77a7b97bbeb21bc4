"""Randomly mutated HTTP requests: truncated, duplicated, swapped, with changed bytes.

The server responds with a status or closes the connection, keeps serving, and leaks no connection.
Seeds are fixed, so failures are reproducible.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from http_helpers import CHAT, KEYS, chat
from server_helpers import ServerProcess

SECONDS = 6.0  # of mutations; at least LEAST are tried
LEAST = 150
SHAPES = 8  # at most so many changes to one request
BODY = json.dumps(chat(max_tokens=2)).encode()
LINE = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[0]}\r\n".encode()
JSON = b"Content-Type: application/json\r\n"
SEEDS = (
    LINE + JSON + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    LINE + JSON + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    LINE + JSON + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    LINE + JSON + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3,
)
PIECES = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b",", b"\xff", b"\x80", b"%00", b"//"),
    *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: 5, 6\r\n"),
    *(b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"Transfer-Encoding: identity, chunked\r\n", b"Transfer-Encoding: xchunked\r\n"),
    *(b"Host: elsewhere\r\n", b"Upgrade: websocket\r\n", b"Connection: close\r\n", b" folded\r\n"),
    *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"-1\r\n"),
    *(b"HTTP/1.1", b"HTTP/0.9", b"HTTP/9.9", b"CONNECT ", b"OPTIONS * HTTP/1.1\r\n\r\n"),
)
Mutation = Callable[[random.Random, bytes], bytes]


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def insert(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.choice(PIECES) + data[place:]


def change(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    place = rng.randrange(len(data))
    return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]


def drop(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.randrange(40) :]


def repeat_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\r\n")
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return b"\r\n".join(lines)


def swap_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\r\n")
    rng.shuffle(lines)
    return b"\r\n".join(lines)


MUTATIONS: tuple[Mutation, ...] = (cut, insert, insert, change, drop, repeat_line, swap_lines)


def mutated(seed: int) -> tuple[bytes, int]:
    """Return a request and the size of the chunks in which it is sent."""
    rng = random.Random(seed)
    data = rng.choice(SEEDS)
    for _ in range(rng.randrange(1, SHAPES)):
        data = rng.choice(MUTATIONS)(rng, data)
    return data, rng.choice((3, 50, 1 << 20))


def answer_to(server: ServerProcess, data: bytes, step: int) -> bytes:
    with server.connect() as connection:
        received = b""
        with contextlib.suppress(OSError):
            for start in range(0, len(data), step):
                connection.sendall(data[start : start + step])
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(1 << 16):
                received += chunk
        return received


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("malformed")
    options = ("--api-key", KEYS[0], "--header-timeout", "5", "--body-timeout", "5")
    with ServerProcess(*options, session_file=folder / "s.db") as process:
        yield process.wait_ready()


def test_malformed_requests_are_answered_or_closed(server: ServerProcess) -> None:
    deadline, seed, seen = time.monotonic() + SECONDS, 0, set()
    while seed < LEAST or time.monotonic() < deadline:
        data, step = mutated(seed)
        received = answer_to(server, data, step)
        for status in re.findall(rb"^HTTP/1\.1 (\d{3})", received, re.MULTILINE):
            assert int(status) < 500, f"seed {seed}: {data!r} -> {received[:300]!r}"
            seen.add(int(status))
        assert not received or received.startswith(b"HTTP/1.1 "), f"seed {seed}: {received[:99]!r}"
        seed += 1
    assert {200, 400} <= seen  # both valid and invalid ones
    with server.client(KEYS[0]) as client:
        assert client.post(CHAT, json=chat(max_tokens=2)).status_code == 200
    server.wait_for(lambda: server.num_connections == 0, "no connection left")
    server.wait_idle(KEYS[0])
    assert not [event for event in server.events() if event["level"] == "error"]
