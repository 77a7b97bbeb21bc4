"""Overload, large and slow requests, CORS and TLS."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fault_engine import STEP_SECONDS
from server_helpers import ServerProcess
from wire_helpers import make_certificate, post_bytes

from llaisys.server.config import Limits
from llaisys.server.errors import ApiError
from llaisys.server.http.event_stream import EventStream
from llaisys.server.http.limits import Admission

LONG = {"prompt": "long", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
PATH = "/v1/completions"
KEY, OTHER = "key-one", "key-two"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two run, three may wait for one second; four per key."""
    with ServerProcess(
        "--api-key", KEY, "--api-key", OTHER,
        "--max-num-seqs", "2", "--max-num-batched-tokens", "64",
        "--max-queued", "3", "--max-per-key", "4", "--queue-timeout", "1.0",
        "--max-body-bytes", "20000", "--max-header-bytes", "4096",
        "--header-timeout", "1.0",
        "--max-prompt-tokens", "1000", "--max-sessions", "3",
        "--allowed-origin", "https://app.example", "--allowed-host", "llm.example",
        env={STEP_SECONDS: "0.01"},
        session_file=tmp_path_factory.mktemp("limits") / "s.db",
    ) as process:  # fmt: skip
        yield process.wait_ready()


def exchange(server: ServerProcess, *pieces: bytes) -> bytes:
    """Send raw bytes and read until the server closes."""
    with server.connect() as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except OSError:
            pass  # rejected before everything was sent
        received = b""
        try:
            while chunk := connection.recv(1 << 16):
                received += chunk
        except ConnectionResetError:
            pass
        return received


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key-one\r\n"


# ---- how many ------------------------------------------------------------------------------------


def test_overload_is_429_with_retry_after_and_the_queue_times_out(
    server: ServerProcess, client: httpx.Client
) -> None:
    done = threading.Event()

    def occupy(key: str) -> int:
        with (
            server.client(key) as mine,
            mine.stream("POST", PATH, json={**LONG, "stream": True}) as response,
        ):
            for _ in response.iter_bytes():
                if done.is_set():
                    break
            return response.status_code

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(occupy, KEY) for _ in range(2)]
        server.wait_for(lambda: server.metric("num_requests_running", KEY) == 2, "two running")
        # Two more reach the limit of the key; the third is rejected.
        waiting = [pool.submit(server.client(KEY).post, PATH, json=LONG) for _ in range(2)]
        server.wait_for(lambda: server.metric("num_requests_waiting", KEY) == 2, "two waiting")
        mine = client.post(PATH, json=LONG)
        assert mine.status_code == 429 and int(mine.headers["retry-after"]) >= 1
        assert "at most 4" in mine.json()["error"]["message"]
        assert server.metric("requests_rejected_total", KEY) >= 1
        with server.client(OTHER) as other:
            served = other.post(PATH, json={**LONG, "max_tokens": 5})
            assert served.status_code == 200  # another key is not affected
        for response in [w.result(30) for w in waiting]:
            assert response.status_code == 503, response.text
            assert response.json()["error"]["code"] == "queue_timeout"
        done.set()
        assert [r.result(30) for r in running] == [200, 200]
    server.wait_idle(KEY)
    assert client.post(PATH, json={"prompt": "x"}).status_code == 200


def test_key_cannot_cancel_requests_of_another_key(server: ServerProcess) -> None:
    with ThreadPoolExecutor(1) as pool, server.client(KEY) as mine, server.client(OTHER) as other:
        answer = pool.submit(mine.post, PATH, json=LONG, headers={"X-Request-Id": "shared-id"})
        server.wait_for(lambda: server.metric("num_requests_running", KEY) == 1, "the request")
        assert other.post("/v1/requests/shared-id/cancel").status_code == 404
        with server.client(OTHER) as second:
            second.post(PATH, json={"prompt": "x"}, headers={"X-Request-Id": "shared-id"})
        assert not answer.done()
        with server.client(KEY) as again:
            assert again.post("/v1/requests/shared-id/cancel").json()["cancelled"] is True
        assert answer.result(30).json()["choices"][0]["finish_reason"] == "abort"


def test_n_above_capacity_is_400(client: httpx.Client) -> None:
    response = client.post(PATH, json={"prompt": "x", "n": 5})
    assert response.status_code == 400 and "4" in response.json()["error"]["message"]


def test_prompt_token_limit(client: httpx.Client) -> None:
    response = client.post(PATH, json={"prompt": "x" * 1001})
    assert response.status_code == 400 and "1000" in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_admission_counts_and_releases() -> None:
    admission = Admission(Limits(max_queued=1), max_num_seqs=2, max_per_key=2)
    with admission.admit("a", 2):
        with pytest.raises(ApiError) as refused, admission.admit("a", 1):
            pass
        assert refused.value.status == 429 and refused.value.retry_after == 1
        with admission.admit("b", 1), pytest.raises(ApiError) as refused, admission.admit("c", 1):
            pass
        assert "3 of 3" in refused.value.message
        admission.record_duration(1000.0)
    assert admission.open == 0 and not admission._by_owner
    assert 1 < admission.retry_after <= 60
    admission.closed = "bye"
    with pytest.raises(ApiError) as refused, admission.admit("a", 1):
        pass
    assert refused.value.status == 503


def test_session_limit(client: httpx.Client) -> None:
    names = [client.post("/v1/sessions", json={}).json()["id"] for _ in range(3)]
    response = client.post("/v1/sessions", json={})
    assert response.status_code == 400 and "3" in response.json()["error"]["message"]
    for name in names:
        client.delete(f"/v1/sessions/{name}")
    assert client.post("/v1/sessions", json={"session_id": "again"}).status_code == 201


@pytest.mark.parametrize("stream", [False, True])
def test_session_over_the_limit_is_rejected_before_generation(
    server: ServerProcess, client: httpx.Client, stream: bool
) -> None:
    for known in client.get("/v1/sessions").json()["data"]:
        client.delete(f"/v1/sessions/{known['id']}")
    for name in ("one", "two", "three"):
        assert client.post("/v1/sessions", json={"session_id": name}).status_code == 201
    server.wait_idle(KEY)
    before = server.metric("prompt_tokens_total", KEY)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": stream}
    refused = client.post("/v1/chat/completions", json={**body, "session_id": "four"})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "too_many_sessions" and "at most 3" in error["message"]
    assert server.metric("prompt_tokens_total", KEY) == before
    known = client.post("/v1/chat/completions", json={**body, "session_id": "two"})
    assert known.status_code == 200


# ---- how large, how slow -------------------------------------------------------------------------


def test_large_bodies_are_413(server: ServerProcess, client: httpx.Client) -> None:
    response = client.post(PATH, json={"prompt": "x" * 20001})
    assert response.status_code == 413 and "20000" in response.json()["error"]["message"]
    for length in (b"99999999999999999999999", b"10000000000"):
        answer = exchange(server, HEAD + b"Content-Length: " + length + b"\r\n\r\n{")
        assert answer.startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))


def test_large_headers_are_431(server: ServerProcess, client: httpx.Client) -> None:
    response = client.get("/health", headers={"X-Long": "x" * 3000})
    assert response.status_code == 200
    answer = exchange(server, b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 100_000)
    assert answer.startswith(b"HTTP/1.1 431") and b"4096" in answer
    many = b"".join(b"X-%d: y\r\n" % i for i in range(2000))
    assert exchange(server, b"GET /health HTTP/1.1\r\n" + many).startswith(b"HTTP/1.1 431")
    url = b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert exchange(server, url).startswith(b"HTTP/1.1 431")


def test_pipelined_requests_are_not_one_large_header(server: ServerProcess) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert exchange(server, one * 200 + last).count(b"HTTP/1.1 200") == 201


def test_stream_that_never_started_is_released() -> None:
    """A generator that never started runs no `finally`; its capacity must still be released."""
    closed: list[str] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: x\n\n"
        finally:
            closed.append("generator")

    async def never(*_: object) -> Any:
        await asyncio.Event().wait()

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    stream = EventStream(events(), lambda: closed.append("release"), "text/event-stream")
    asyncio.run(asyncio.wait_for(stream({}, gone, never), 30))
    assert closed == ["release"]


def test_invalid_http_is_400(server: ServerProcess) -> None:
    for junk in (b"\x16\x03\x01\x02\x00\x01\x00", b"HELO\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        assert exchange(server, junk).startswith((b"HTTP/1.1 400", b"HTTP/1.1 408"))
    smuggle = HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert exchange(server, smuggle).startswith(b"HTTP/1.1 4")


# ---- origins -------------------------------------------------------------------------------------


def test_cors_is_an_allow_list(client: httpx.Client, server: ServerProcess) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Origin": "https://app.example"}
    with server.client() as anonymous:  # a preflight carries no key
        answer = anonymous.options(PATH, headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        evil = anonymous.options(PATH, headers={**asked, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in evil.headers
    good = client.post(PATH, json={"prompt": "x"}, headers={"Origin": "https://app.example"})
    assert good.status_code == 200
    assert good.headers["access-control-allow-origin"] == "https://app.example"
    bad = client.post(PATH, json={"prompt": "x"}, headers={"Origin": "https://evil.example"})
    assert bad.status_code == 403 and "access-control-allow-origin" not in bad.headers
    assert client.get("/health", headers={"Host": "llm.example"}).status_code == 200


def test_preflight_of_openai_javascript_client_is_allowed(server: ServerProcess) -> None:
    own = ("arch", "lang", "os", "package-version", "retry-count", "runtime", "timeout")
    names = ["authorization", "content-type", *(f"x-stainless-{name}" for name in own)]
    asked = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": ",".join(names),
    }
    with server.client() as anonymous:
        answer = anonymous.options(PATH, headers=asked)
        assert answer.status_code == 200
        allowed = answer.headers["access-control-allow-headers"].lower()
        assert {name.strip() for name in allowed.split(",")} >= set(names)
        evil = anonymous.options(PATH, headers={**asked, "Origin": "https://evil.example"})
        assert evil.status_code >= 400


# ---- connections ---------------------------------------------------------------------------------


def test_tls(tmp_path: Path) -> None:
    certificate, key, authority = make_certificate(tmp_path)
    with ServerProcess(
        "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key),
        "--header-timeout", "1", "--send-timeout", "1",
        env={STEP_SECONDS: "0.005"}, session_file=tmp_path / "s.db",
    ) as server:  # fmt: skip
        url = server.wait_ready().url
        trust = ssl.create_default_context(cafile=str(authority))
        assert url.startswith("https://")
        assert httpx.get(f"{url}/health", verify=trust).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/health")
        # The limits on slow clients apply with TLS too.
        silent = trust.wrap_socket(server.connect(), server_hostname="127.0.0.1")
        deaf = trust.wrap_socket(server.connect(2048), server_hostname="127.0.0.1")
        deaf.sendall(post_bytes({**LONG, "n": 8, "logprobs": 20, "stream": True}))
        assert silent.recv(64).startswith(b"HTTP/1.1 408")
        silent.close()
        server.wait_for(lambda: server.num_connections == 0, "the deaf one to be dropped")
        deaf.close()
        assert server.stop() == 0


def test_connection_over_the_limit_gets_503(tmp_path: Path) -> None:
    with ServerProcess("--max-connections", "3", session_file=tmp_path / "s.db") as server:
        server.wait_ready()
        connections = [server.connect() for _ in range(2)]
        with server.client() as client, server.client() as other:
            body = {"prompt": "x", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200
            refused = other.post("/v1/completions", json=body)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.headers["connection"] == "close"
            error = refused.json()["error"]
            assert error["code"] == "too_many_connections"
            assert error["request_id"] == refused.headers["x-request-id"]
            assert client.post("/v1/completions", json=body).status_code == 200
            connections.pop().close()
            server.wait_for(lambda: other.get("/health").status_code == 200, "a free place")
        for connection in connections:
            connection.close()
