"""`llaisys bench serve` against this server, a standard-fields-only one, and faulty ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from error_helpers import naming
from fault_engine import STEP_SECONDS
from server_helpers import PACKAGE, ServerProcess
from wire_helpers import make_certificate

from llaisys.bench.http_client import Endpoint
from llaisys.bench.serve import BenchError, ServeOptions, percentiles, run_serve
from llaisys.common.errors import InvalidInputError

KEY = "bench-key"
REPORT = {
    "concurrency", "throughput_tok_s", "ttft_ms", "itl_ms", "e2e_ms", "errors", "requests",
    "duration_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(
        "--max-num-seqs", "4", "--max-queued", "4", "--api-key", KEY, env={STEP_SECONDS: "0.002"},
        session_file=tmp_path_factory.mktemp("bench") / "s.db",
    ) as process:  # fmt: skip
        yield process.wait_ready()


def options(url: str, **fields: Any) -> ServeOptions:
    settings: dict[str, Any] = {"api_key": KEY, "prompt_tokens": 200, "new_tokens": 9}
    return ServeOptions(url, **{**settings, "requests": 12, "timeout": 60, "seed": 1, **fields})


@pytest.mark.parametrize("chat", [True, False])
def test_closed_loop_counts_every_token_once(server: ServerProcess, chat: bool) -> None:
    before = server.metric("generation_tokens_total", KEY)
    result = run_serve(options(server.url, chat=chat, concurrency=5))
    report = result.report
    assert set(report) == REPORT and result.ignored_eos
    assert (report["errors"], report["requests"], report["concurrency"]) == (0, 12, 5)
    assert report["throughput_tok_s"] == pytest.approx(12 * 9 / report["duration_s"], rel=0.01)
    generated = server.metric("generation_tokens_total", KEY) - before
    assert generated == 12 * 9 + 3  # three for calibration
    assert 150 <= result.prompt_tokens <= 250  # approximate
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert 0 <= report[name]["p50"] <= report[name]["p90"] <= report[name]["p99"]
    assert report["ttft_ms"]["p50"] < report["e2e_ms"]["p50"] < 1e3 * report["duration_s"]
    assert server.metric("num_requests_running", KEY) == 0


def test_open_loop_does_not_wait_and_reports_rejections(server: ServerProcess) -> None:
    """An open loop exceeds the capacity, since arrivals do not wait."""
    result = run_serve(options(server.url, rate=2000.0, requests=60, new_tokens=30))
    report = result.report
    assert report["requests"] == 60 and 0 < report["errors"] < 60
    assert result.reasons == {"HTTP 429: full": report["errors"]}
    assert report["concurrency"] > 8


def test_command_prints_table_and_json(server: ServerProcess) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llaisys", "bench", "serve", "--url", f"{server.url}/v1"]
        command += ["--requests", "3", "--new-tokens", "4", "--prompt-tokens", "60"]
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "LLAISYS_API_KEY": KEY}
        return subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True, timeout=60
        )

    document = json.loads(run("--json", "--concurrency", "2", "--plain").stdout)
    assert set(document) == REPORT and document["errors"] == 0
    table = run("--rate", "50", "--endpoint", "completions").stdout
    assert "throughput" in table and "p99" in table and "errors 0" in table
    runs = json.loads(run("--json", "--concurrency", "1,2").stdout)["runs"]
    assert [found["concurrency"] for found in runs] == [1, 2]
    refused = run("--api-key", "wrong")
    assert refused.returncode == 1 and "invalid_api_key" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert run("--concurrency", "0").returncode == 1
    assert run("--concurrency", "2", "--rate", "2").returncode == 2


# ---- servers of other makes, some of them bad ----------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
LAST_CHUNK = b"0\r\nTrailer: 1\r\n\r\n"


@contextlib.contextmanager
def answering(
    answer: Callable[[dict[str, Any]], bytes], tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """A server that sends `answer(body)` to each POST; it keeps the connection alive only after a
    complete chunked response."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = int(head.split("content-length: ")[1].split("\r\n")[0])
                data = answer(json.loads(await reader.readexactly(size)))
                for start in range(0, len(data), 7):  # in arbitrary chunks
                    writer.write(data[start : start + 7])
                    await writer.drain()
                if not data.endswith(LAST_CHUNK):
                    writer.close()
                    return

    loop = asyncio.new_event_loop()
    listener = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        port = listener.sockets[0].getsockname()[1]
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        listener.close()
        loop.close()


def events(*chunks: dict[str, Any] | str) -> bytes:
    return b"".join(
        b"data: " + (c if isinstance(c, str) else json.dumps(c)).encode() + b"\r\n\r\n"
        for c in chunks
    )


def text_chunks(count: int) -> list[dict[str, Any] | str]:
    pieces = [{"choices": [{"delta": {"content": "x"}, "finish_reason": None}]}] * count
    return [*pieces, {"choices": [{"delta": {}, "finish_reason": "length"}]}, "[DONE]"]


def chunked(data: bytes) -> bytes:
    pieces = [data[i : i + 50] for i in range(0, len(data), 50)]
    framed = b"".join(b"%x;a=b\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + framed + LAST_CHUNK


def test_sends_only_standard_fields_to_other_servers() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> bytes:
        bodies.append(body)
        if "ignore_eos" in body:
            text = b'{"error": {"message": "unknown field: ignore_eos"}}'
            return b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
        return chunked(events(*text_chunks(3)))

    with answering(answer) as url:
        result = run_serve(options(url, model="other", requests=4))
        assert not result.ignored_eos and result.report["errors"] == 0
        assert sum("ignore_eos" in body for body in bodies) == 1
        bodies.clear()
        run_serve(options(url, model="other", requests=2, plain=True))
    assert {name for body in bodies for name in body} == {
        "model", "messages", "max_tokens", "temperature", "stream", "stream_options",
    }  # fmt: skip
    assert result.report["throughput_tok_s"] > 0 and result.new_tokens == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (chunked(events(*text_chunks(2)[:-1])), "without a finish_reason and [DONE]"),
        (chunked(events(*text_chunks(2)))[:-60], "the connection was closed"),
        (HEAD + b"\r\n" + events({"error": {"code": "engine_error"}}), "error event: engine_error"),
        (HEAD + b"\r\n" + events("{"), "not a completion chunk"),
        (HEAD + b"\r\n" + events("[1]"), "not a completion chunk"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP response"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "not an HTTP response"),
        (b"HTTP/1.1 500 Bad\r\n\r\noh no", "HTTP 500: oh no"),
        (b"", "the connection was closed"),
    ],
)
def test_incomplete_responses_are_errors_with_reason(answer: bytes, reason: str) -> None:
    asked = 0

    def turn_bad(_: dict[str, Any]) -> bytes:
        nonlocal asked
        asked += 1
        if asked > 2:
            return answer
        return HEAD + b"\r\n" + events(*text_chunks(2))

    with answering(turn_bad) as url:
        result = run_serve(options(url, model="m", requests=3, concurrency=1, timeout=10))
    assert result.report["errors"] >= 2
    assert all(reason in text for text in result.reasons), result.reasons


def test_unreachable_server_is_reported() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(BenchError):
        run_serve(options(url))


def test_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with naming(BenchError, "0.3 s"):
            run_serve(options(url, model="m", timeout=0.3))


def test_https(tmp_path: Path) -> None:
    certificate, key, _ = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with answering(lambda _: chunked(events(*text_chunks(3))), context) as url:
        with naming(BenchError, "CERTIFICATE_VERIFY_FAILED"):
            run_serve(options(url, model="m", requests=2))
        assert run_serve(options(url, model="m", insecure=True)).report["errors"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("concurrency", 0), ("rate", 0.0), ("requests", 0), ("new_tokens", 0), ("timeout", 0.0)],
)
def test_options_are_checked_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match="--" + field.replace("_", "-")):
        ServeOptions(**{field: value})


def test_urls() -> None:
    assert Endpoint.of("https://h/v1/").port == 443 and Endpoint.of("h:81").port == 81
    nested = Endpoint.of("http://[::1]:9/base/v1")
    assert (nested.path, nested.authority) == ("/base", "[::1]:9")
    for url in ("ftp://h", "http://", "http://h:99999", "unix:///x"):
        with pytest.raises(InvalidInputError):
            Endpoint.of(url)


def test_percentiles_are_nearest_rank() -> None:
    assert percentiles([i / 1000 for i in range(1, 101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([0.003]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}
