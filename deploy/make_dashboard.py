#!/usr/bin/env python3
"""Write deploy/grafana.json: the dashboard, two panels per row.

deploy/make_dashboard.py > deploy/grafana.json
"""

from __future__ import annotations

import json
from typing import Any

MODEL = '{model_name=~"$model"}'
SOURCE = {"type": "prometheus", "uid": "${source}"}


def quantile(q: float, name: str) -> str:
    rate = f"sum by (le, model_name) (rate(llaisys:{name}_bucket{MODEL}[$__rate_interval]))"
    return f"histogram_quantile({q}, {rate})"


def rate(name: str, by: str = "model_name", labels: str = MODEL) -> str:
    return f"sum by ({by}) (rate(llaisys:{name}{labels}[$__rate_interval]))"


def gauge(name: str, by: str = "model_name", labels: str = MODEL) -> str:
    return f"sum by ({by}) (llaisys:{name}{labels})"


# title, unit, [(expression, legend)]
PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Time to first token", "s", [
        (quantile(0.5, "time_to_first_token_seconds"), "{{model_name}} median"),
        (quantile(0.99, "time_to_first_token_seconds"), "{{model_name}} p99")]),
    ("Inter-token latency", "s", [
        (quantile(0.5, "inter_token_latency_seconds"), "{{model_name}} median"),
        (quantile(0.99, "inter_token_latency_seconds"), "{{model_name}} p99")]),
    ("End-to-end latency", "s", [
        (quantile(0.5, "e2e_request_latency_seconds"), "{{model_name}} median"),
        (quantile(0.99, "e2e_request_latency_seconds"), "{{model_name}} p99")]),
    ("Queue time", "s", [
        (quantile(0.5, "request_queue_time_seconds"), "{{model_name}} median"),
        (quantile(0.99, "request_queue_time_seconds"), "{{model_name}} p99")]),
    ("Tokens", "short", [
        (rate("prompt_tokens_total"), "{{model_name}} prompts"),
        (rate("generation_tokens_total"), "{{model_name}} generated")]),
    ("Sequences", "short", [
        (gauge("num_requests_running"), "{{model_name}} running"),
        (gauge("num_requests_waiting"), "{{model_name}} waiting")]),
    ("Finished, by reason", "short", [
        (rate("request_success_total", "finished_reason"), "{{finished_reason}}")]),
    ("Responses, by status", "short", [
        (rate("http_requests_total", "status", ""), "{{status}}")]),
    ("KV cache usage", "percentunit", [
        (gauge("kv_cache_usage_perc"), "{{model_name}}")]),
    ("Prefix cache hit rate", "percentunit", [
        (f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}",
         "{{model_name}}")]),
    ("Draft acceptance rate", "percentunit", [
        (f"{rate('spec_decode_num_accepted_tokens_total')} / "
         f"{rate('spec_decode_num_draft_tokens_total')}", "{{model_name}}")]),
    ("Preemptions and failed steps", "short", [
        (rate("num_preemptions_total"), "{{model_name}} preemptions"),
        (rate("worker_errors_total"), "{{model_name}} failed")]),
    ("Models in memory", "bytes", [
        (gauge("engine_resident_memory_bytes"), "{{model_name}} resident"),
        ("llaisys:models_memory_reserved_bytes", "reserved"),
        ("llaisys:models_memory_budget_bytes", "budget")]),
    ("Model loads and failures", "short", [
        (rate("model_loads_total"), "{{model_name}} loads"),
        (rate("model_unloads_total"), "{{model_name}} unloads"),
        (rate("model_failures_total"), "{{model_name}} failures")]),
    ("Tokens, by key", "short", [
        (rate("key_prompt_tokens_total", "key", ""), "{{key}} prompts"),
        (rate("key_generation_tokens_total", "key", ""), "{{key}} generated")]),
    ("Rejected, by key and limit", "short", [
        (rate("key_rejected_total", "key, limit", ""), "{{key}} {{limit}}"),
        (rate("requests_rejected_total", "reason"), "{{reason}}")]),
]  # fmt: skip


def panel(number: int, title: str, unit: str, rows: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(rows)
        ],
    }


def dashboard() -> dict[str, Any]:
    model = {
        "name": "model",
        "type": "query",
        "datasource": SOURCE,
        "query": "label_values(llaisys:generation_tokens_total, model_name)",
        "includeAll": True,
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }
    source = {"name": "source", "type": "datasource", "query": "prometheus"}
    return {
        "title": "NovaInfer",
        "uid": "llaisys",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": [source, model]},
        "panels": [panel(number, *row) for number, row in enumerate(PANELS)],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
