"""Upgrade offers and trailers do not change a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_helpers import CHAT, KEYS, chat, error_of
from server_helpers import ServerProcess
from wire_helpers import read_to_end

BODY = json.dumps(chat(max_tokens=3)).encode()
NEXT = (
    b"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n"
    b"Connection: close\r\n\r\n"
)
H2C = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
)
WEBSOCKET = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("protocol") / "s.db"
    with ServerProcess("--api-key", KEYS[0], session_file=file) as process:
        yield process.wait_ready()


def head(offer: bytes, framing: bytes, key: bytes = KEYS[0].encode()) -> bytes:
    return (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer %b\r\n" % (CHAT.encode(), key)
    ) + offer + framing + b"\r\n"  # fmt: skip


def chunked(body: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:]))


LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize("offer", [b"", H2C, WEBSOCKET], ids=["none", "h2c", "websocket"])
@pytest.mark.parametrize("framing", [LENGTH, CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("step", [1, 7, 100_000], ids=["by 1", "by 7", "at once"])
def test_upgrade_offer_does_not_lose_the_body(
    server: ServerProcess, offer: bytes, framing: bytes, step: int
) -> None:
    """Also with the next request in the same packet."""
    body = BODY if framing is LENGTH else chunked(BODY) + b"0\r\n\r\n"
    sent = head(offer, framing) + body + NEXT % KEYS[0].encode()
    with server.connect() as connection:
        connection.setsockopt(6, 1, 1)  # TCP_NODELAY keeps packets separate
        for start in range(0, len(sent), step):
            connection.sendall(sent[start : start + step])
        received = read_to_end(connection)
    assert received.count(b"HTTP/1.1 200") == 2, received
    assert b"chat.completion" in received and b'"version"' in received


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
def test_upgrade_offer_without_a_body(server: ServerProcess, offer: bytes) -> None:
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + offer + b"\r\n"
    with server.connect() as connection:
        connection.sendall(first + first + NEXT % KEYS[0].encode())
        received = read_to_end(connection)
    assert received.count(b"HTTP/1.1 200") == 3, received


def test_body_is_not_parsed_as_a_request(server: ServerProcess) -> None:
    """Bytes that the parser skips after an upgrade offer must not become the next request."""
    inner = NEXT % KEYS[0].encode()
    first = head(H2C, b"Content-Length: %d\r\n" % len(inner)) + inner
    with server.connect() as connection:
        connection.sendall(first + NEXT % KEYS[0].encode())
        received = read_to_end(connection)
    assert received.count(b"HTTP/1.1 ") == 2 and received.count(b'"version"') == 1, received
    assert received.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("offer", [b"", H2C], ids=["none", "h2c"])
def test_trailers_are_not_headers(server: ServerProcess, offer: bytes) -> None:
    trailers = b"Authorization: Bearer %b\r\nHost: elsewhere\r\nX-Request-Id: trailed\r\n" % (
        KEYS[0].encode()
    )
    body = chunked(BODY) + b"0\r\n" + trailers + b"\r\n"
    for key, status in ((b"wrong", b"401"), (KEYS[0].encode(), b"200")):
        with server.connect() as connection:
            sent = head(offer, CHUNKED + b"Trailer: Authorization\r\n", key) + body
            connection.sendall(sent + NEXT % KEYS[0].encode())
            received = read_to_end(connection)
        assert received.startswith(b"HTTP/1.1 " + status), received
        assert b"trailed" not in received


def test_invalid_http_is_logged(server: ServerProcess) -> None:
    with server.connect() as connection:
        connection.sendall(b"\x16\x03\x01 not http at all\r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 400")
    server.wait_for(
        lambda: any(
            event["message"] == "rejected" and event["status"] == 400 for event in server.events()
        ),
        "a line in the log",
    )
    assert not any("not http" in line for line in server.log)


def admission(server: ServerProcess, size: int) -> bytes:
    """Status code of a request that announces a body and sends none of it: 100 or an error."""
    framing = b"Content-Length: %d\r\nExpect: 100-continue\r\n" % size
    with server.connect() as connection:
        connection.sendall(head(b"", framing))
        return connection.recv(1 << 16).split()[1]


def test_bodies_being_received_share_one_budget(tmp_path: Path) -> None:
    """Eight unfinished large bodies fit; the next one is rejected, small ones are not."""
    options = ("--max-total-body-bytes", "7600000", "--max-body-bytes", "2000000")
    with ServerProcess(*options, session_file=tmp_path / "s.db") as server:
        server.wait_ready()
        start = head(b"", CHUNKED) + b"%x\r\n" % 1_500_000 + b" " * 1_000_000
        connections = []
        for _ in range(8):
            assert admission(server, 200_000) == b"100"
            connection = server.connect()
            connection.sendall(start)
            connections.append(connection)
        # Does not fit beside eight bodies of which less than 10 KB are still to arrive.
        server.wait_for(lambda: admission(server, 200_000) == b"503", "eight bodies")
        with server.client() as client:
            large = chat(max_tokens=2, messages=[{"role": "user", "content": "x" * 1_500_000}])
            answer = client.post(CHAT, json=large)
            assert error_of(answer, 503)["code"] == "too_many_bodies"
            assert answer.headers["retry-after"] == "1"
            assert client.post(CHAT, json=chat(max_tokens=2)).status_code == 200
            with server.connect() as ninth:
                ninth.sendall(start)
                assert read_to_end(ninth).startswith(b"HTTP/1.1 503")
            for connection in connections:
                connection.close()
            server.wait_for(lambda: client.post(CHAT, json=large).status_code == 400, "room again")
