"""OpenTelemetry traces (--otlp-traces-endpoint): a span per HTTP request with child spans for the
queue, prefill and decode time of each output.

A `traceparent` header is honoured. Without the option OpenTelemetry is not imported, and the cost
is one context variable lookup per output.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llaisys.common.errors import InvalidInputError
from llaisys.common.types import RequestOutput
from llaisys.common.validation import invalid_value

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

NANOS = 1_000_000_000
MAX_OUTPUTS = 128  # traced per request
LOGGED = {  # field of the request's log line -> span attribute
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cached_tokens",
    "finish_reason": "gen_ai.response.finish_reason",
}

# Outputs of the current task's request, with their completion times; None: not traced.
_answers: ContextVar[list[tuple[int, RequestOutput]] | None] = ContextVar("answers", default=None)


def record_output(output: RequestOutput) -> None:
    """Record a complete output of the current request if requests are traced."""
    answers = _answers.get()
    if answers is not None and len(answers) < MAX_OUTPUTS:
        answers.append((time.time_ns(), output))


class TraceRequests:
    """The outermost middleware; `tracer` creates the spans."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self.tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers: list[tuple[int, RequestOutput]] = []
        token = _answers.set(answers)
        start, status = time.time_ns(), 0

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_record)
        finally:
            _answers.reset(token)
            self._record(scope, start, status or 499, answers)

    def _record(
        self, scope: Scope, start: int, status: int, answers: list[tuple[int, RequestOutput]]
    ) -> None:
        from opentelemetry import trace
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode

        parent = {
            key.decode(): value.decode("latin-1")
            for key, value in scope["headers"]
            if key in (b"traceparent", b"tracestate")
        }
        route = getattr(scope.get("route"), "path", "other")
        span = self.tracer.start_span(
            f"{scope['method']} {route}",
            context=extract(parent),
            kind=SpanKind.SERVER,
            start_time=start,
            attributes=self._attributes(scope, route, status),
        )
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        inside = trace.set_span_in_context(span)
        for end, output in answers:
            for name, begin, until in stages(end, output):
                child = self.tracer.start_span(name, context=inside, start_time=begin)
                child.end(end_time=until)
        span.end()

    def _attributes(self, scope: Scope, route: str, status: int) -> dict[str, Any]:
        state = scope["state"]
        found = {
            "http.request.method": scope["method"],
            "http.route": route,
            "http.response.status_code": status,
            "gen_ai.request.id": state.get("request_id"),
            "llaisys.key": state.get("key"),
            "error.type": state.get("error"),
        }
        logged = state.get("log", {})
        found |= {name: logged.get(field) for field, name in LOGGED.items()}
        return {name: value for name, value in found.items() if value is not None}


def stages(end: int, output: RequestOutput) -> list[tuple[str, int, int]]:
    """Return (name, begin, end) in nanoseconds for the stages of an output's first choice."""
    times = output.outputs[0].timings
    if times.total is None:
        return []
    arrival = end - int(times.total * NANOS)
    found: list[tuple[str, int, int]] = []
    at = arrival
    for name, seconds in (("queue", times.queue), ("prefill", times.first_token)):
        if seconds is None:
            return found
        until = max(at, arrival + int(seconds * NANOS))
        found.append((name, at, until))
        at = until
    return [*found, ("decode", at, max(at, end))]


def open_tracer(endpoint: str) -> tuple[Tracer, Any]:
    """Return (tracer, provider to shut down at exit). Raises InvalidInputError."""
    if not endpoint.startswith(("http://", "https://")):
        raise invalid_value(
            "otlp_traces_endpoint", endpoint, "a URL like http://localhost:4318/v1/traces"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidInputError(
            f"--otlp-traces-endpoint needs pip install 'llaisys[otel]' ({error.name} is missing)",
            field="otlp_traces_endpoint",
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "llaisys"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider.get_tracer("llaisys"), provider
