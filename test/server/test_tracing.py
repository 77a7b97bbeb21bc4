"""Traces reach a collector with the caller's trace id; without the option nothing is imported."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from error_helpers import invalid_input
from server_helpers import PACKAGE, ServerProcess

from llaisys.server.tracing import open_tracer

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
ASK = {"prompt": "hello", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


class Collector(ThreadingHTTPServer):
    """Receives the requests of an OTLP exporter."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_request_and_stages_are_traced_under_the_callers_span(collector: Collector) -> None:
    with ServerProcess("--otlp-traces-endpoint", collector.url, "--api-key", "sekret") as server:
        server.wait_ready()
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        with server.client("sekret", headers=headers) as client:
            assert client.post("/v1/completions", json=ASK).status_code == 200
            events = client.post("/v1/completions", json=ASK | {"stream": True}).text
            assert events.endswith("data: [DONE]\n\n")
            assert client.post("/v1/completions", json={}).status_code == 400
        with server.client("sekret") as client:
            client.get("/v1/models")
        assert server.stop() == 0  # flushes pending spans
    spans = collector.spans
    asked = [span for span in spans if span.name == "POST /v1/completions"]
    assert len(asked) == 3
    assert all(span.trace_id.hex() == TRACE for span in asked)
    assert all(span.parent_span_id.hex() == PARENT for span in asked)

    def facts(span: Any) -> dict[str, Any]:
        return {item.key: item.value for item in span.attributes}

    def status(span: Any) -> int:
        return int(facts(span)["http.response.status_code"].int_value)

    assert sorted(map(status, asked)) == [200, 200, 400]
    for span in asked:
        inside = [child for child in spans if child.parent_span_id == span.span_id]
        if status(span) == 400:
            assert not inside
            continue
        assert [child.name for child in inside] == ["queue", "prefill", "decode"]
        edges = [(child.start_time_unix_nano, child.end_time_unix_nano) for child in inside]
        assert span.start_time_unix_nano <= edges[0][0] + 1_000_000
        assert edges[0][1] == edges[1][0] and edges[1][1] == edges[2][0]
        assert edges[2][1] <= span.end_time_unix_nano
        values = facts(span)
        assert values["gen_ai.usage.output_tokens"].int_value == 3
        assert values["llaisys.key"].string_value == "key1"
    (listed,) = [span for span in spans if span.name == "GET /v1/models"]
    assert listed.trace_id.hex() != TRACE and not listed.parent_span_id
    assert "sekret" not in str(spans) and "hello" not in str(spans)


def test_opentelemetry_is_not_imported_without_the_option() -> None:
    """The SDK is not imported; other libraries may import the API."""
    code = "import sys, llaisys.server.lifecycle as _; print('opentelemetry.sdk' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == "False", found.stderr


def test_invalid_endpoint_url_is_rejected() -> None:
    with invalid_input("otlp_traces_endpoint"):
        open_tracer("x")
