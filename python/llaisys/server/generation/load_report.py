"""ORCA load reports: the header that load balancers read, as vLLM sends it."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import Response

from llaisys.server.collectors import MeasuredEngine, engine_gauges

FORMAT_HEADER = "endpoint-load-metrics-format"  # of a request: TEXT or JSON
REPORT_HEADER = "endpoint-load-metrics"
GAUGES = ("kv_cache_usage_perc", "num_requests_waiting")


def with_load_report(response: Response, request: Request, engine: MeasuredEngine) -> Response:
    """Add the load of the engine to the response, if the request asks for it."""
    format = request.headers.get(FORMAT_HEADER, "").upper()
    if format in ("JSON", "TEXT"):
        gauges = engine_gauges(engine)
        values = {name: float(gauges[name]) for name in GAUGES}
        pairs = ", ".join(f"named_metrics.{name}={value}" for name, value in values.items())
        report = pairs if format == "TEXT" else json.dumps({"named_metrics": values})
        response.headers[REPORT_HEADER] = f"{format} {report}"
    return response
