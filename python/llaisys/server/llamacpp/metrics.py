"""The metrics of llama.cpp's server, for dashboards that know its names; where one model is served.

`n_tokens_max`, which is no sum, is a gauge here; everything else has the type that it has there.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llaisys.server.collectors import MeasuredModel
from llaisys.server.engine_client.messages import EngineStats
from llaisys.server.metrics import RequestTotals

PREFIX = "llamacpp:"


class LlamaCollector(Collector):
    def __init__(self, totals: RequestTotals, models: Iterable[MeasuredModel]) -> None:
        self.totals = totals
        self.models = models

    def collect(self) -> Iterable[Metric]:
        totals = self.totals
        engines = [model.engine_or_none for model in self.models]
        stats = [engine.stats for engine in engines if engine is not None]
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens computed.", totals.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", totals.cached),
            ("prompt_seconds", "From the start of prompts to first tokens.", totals.prompt_seconds),
            ("tokens_predicted", "Generated tokens.", totals.predicted),
            ("tokens_predicted_seconds", "After first tokens.", totals.predicted_seconds),
            ("n_decode", "Steps of the engines.", _sum(stats, "num_steps")),
            ("spec_decode_num_drafts", "Drafts.", _sum(stats, "spec_decode_num_drafts")),
            ("spec_decode_num_draft_tokens", "Their tokens.",
             _sum(stats, "spec_decode_num_draft_tokens")),
            ("spec_decode_num_accepted_tokens", "Those that were accepted.",
             _sum(stats, "spec_decode_num_accepted_tokens")),
        ):  # fmt: skip
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        running = _sum(stats, "num_running")
        steps = _sum(stats, "num_steps")
        for name, text, value in (
            ("prompt_tokens_seconds", "Prompt tokens a second.",
             _rate(totals.prompt_tokens, totals.prompt_seconds)),
            ("predicted_tokens_seconds", "Generated tokens a second.",
             _rate(totals.predicted, totals.predicted_seconds)),
            ("requests_processing", "Sequences that run.", running),
            ("requests_deferred", "Sequences that wait.", _sum(stats, "num_waiting")),
            ("n_busy_slots_per_decode", "Generated tokens a step.",
             _rate(totals.predicted, steps)),
            ("n_tokens_max", "Of the longest context so far.", totals.longest),
        ):  # fmt: skip
            yield GaugeMetricFamily(PREFIX + name, text, value=value)


def _sum(stats: list[EngineStats], name: str) -> int:
    return sum(getattr(entry, name) for entry in stats)


def _rate(count: float, over: float) -> float:
    return count / over if over else 0.0
