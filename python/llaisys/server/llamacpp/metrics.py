"""Metrics under the names and types of llama.cpp's server, for a server with one model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llaisys.server.engine_client.messages import EngineStats
from llaisys.server.metrics import RequestTotals

if TYPE_CHECKING:
    from llaisys.server.service import Service

PREFIX = "llamacpp:"


class CasedName(bytes):
    """A header name that is sent as written. uvicorn sends names in lower case, and scripts of
    llama.cpp compare them with case."""

    def lower(self) -> CasedName:
        return self


START_HEADER = CasedName(b"Process-Start-Time-Unix")


class LlamaCollector(Collector):
    def __init__(self, totals: RequestTotals, models: Iterable[Service]) -> None:
        self.totals = totals
        self.models = models

    def collect(self) -> Iterable[Metric]:
        totals = self.totals
        engines = [model.engine_or_none for model in self.models]
        stats = [engine.stats for engine in engines if engine is not None]
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens computed.", totals.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", totals.cached),
            ("prompt_seconds", "Prompt processing time.", totals.prompt_seconds),
            ("tokens_predicted", "Generated tokens.", totals.predicted),
            ("tokens_predicted_seconds", "Time after first tokens.", totals.predicted_seconds),
            ("n_decode", "Engine steps.", _sum(stats, "num_steps")),
            ("spec_decode_num_drafts", "Verified drafts.", _sum(stats, "spec_decode_num_drafts")),
            ("spec_decode_num_draft_tokens", "Draft tokens.",
             _sum(stats, "spec_decode_num_draft_tokens")),
            ("spec_decode_num_accepted_tokens", "Accepted draft tokens.",
             _sum(stats, "spec_decode_num_accepted_tokens")),
        ):  # fmt: skip
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        running = _sum(stats, "num_running")
        steps = _sum(stats, "num_steps")
        for name, text, value in (
            ("prompt_tokens_seconds", "Prompt tokens per second.",
             _rate(totals.prompt_tokens, totals.prompt_seconds)),
            ("predicted_tokens_seconds", "Generated tokens per second.",
             _rate(totals.predicted, totals.predicted_seconds)),
            ("requests_processing", "Running sequences.", running),
            ("requests_deferred", "Waiting sequences.", _sum(stats, "num_waiting")),
            ("n_busy_slots_per_decode", "Generated tokens per step.",
             _rate(totals.predicted, steps)),
            ("n_tokens_max", "Longest context so far, in tokens.", totals.longest),
        ):  # fmt: skip
            yield GaugeMetricFamily(PREFIX + name, text, value=value)


def with_llama_types(text: bytes) -> bytes:
    """Declare `n_tokens_max` a counter, as llama.cpp does; the client library appends _total to the
    name of a counter."""
    name = f"# TYPE {PREFIX}n_tokens_max ".encode()
    return text.replace(name + b"gauge", name + b"counter")


def _sum(stats: list[EngineStats], name: str) -> int:
    return sum(getattr(entry, name) for entry in stats)


def _rate(count: float, over: float) -> float:
    return count / over if over else 0.0
