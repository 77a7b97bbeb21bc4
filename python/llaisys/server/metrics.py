"""Prometheus metrics under the names that dashboards know from vLLM, with the prefix `llaisys:`.

What the engine counts comes from its latest report; what happens to requests is counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llaisys.common.types import CompletionOutput, Usage
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.engine_client.messages import EngineStats
from llaisys.server.keys.ring import KeyRing

PREFIX = "llaisys:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
               7.5, 10.0, 20.0, 40.0, 80.0, 160.0)  # fmt: skip
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
             1.0, 2.5, 5.0)  # fmt: skip
WHOLE = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
         50.0, 60.0, 120.0, 240.0, 480.0, 960.0)  # fmt: skip
TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))


class EngineCollector(Collector):
    """The engine's own numbers, read when somebody asks for them."""

    def __init__(self, engine: AsyncLLMEngine, model: str) -> None:
        self.engine = engine
        self.model = model

    def collect(self) -> Iterable[Metric]:
        stats, (cpu, rss) = self.engine.stats, self.engine.usage
        usage = stats.kv_blocks_used / stats.kv_blocks if stats.kv_blocks else 0.0
        yield self._gauge("num_requests_running", "Sequences that run.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 1 = all.", usage)
        yield self._gauge("kv_cache_blocks", "KV blocks.", stats.kv_blocks)
        yield self._gauge("kv_cache_blocks_used", "KV blocks in use.", stats.kv_blocks_used)
        yield self._gauge(
            "kv_cache_blocks_cached",
            "Unused KV blocks with a known prefix.",
            stats.kv_blocks_cached,
        )
        yield self._gauge("engine_resident_memory_bytes", "Of the engine process.", rss)
        yield self._counter("engine_cpu_seconds", "CPU time of the engine process.", cpu)
        yield self._counter("engine_steps", "Steps of the engine.", stats.num_steps)
        yield self._counter("num_preemptions", "Preemptions.", stats.num_preemptions)
        yield self._counter("num_context_shifts", "Context shifts.", stats.num_context_shifts)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries
        )
        yield self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits
        )
        yield from self._drafts(stats)
        yield self._counter("worker_errors", "Calls that raised in a worker.", stats.worker_errors)
        yield self._counter(
            "executor_timeouts", "Calls that a worker did not answer.", stats.executor_timeouts
        )

        stages = CounterMetricFamily(
            PREFIX + "engine_stage_seconds", "Time in a stage.", labels=["model_name", "stage"]
        )
        for stage, seconds in stats.stage_seconds.items():
            stages.add_metric([self.model, stage], seconds)
        yield stages

    def _drafts(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter(
            "spec_decode_num_drafts", "Drafts verified.", stats.spec_decode_num_drafts
        )
        yield self._counter(
            "spec_decode_num_draft_tokens", "Their tokens.", stats.spec_decode_num_draft_tokens
        )
        yield self._counter(
            "spec_decode_num_accepted_tokens",
            "Those that were accepted.",
            stats.spec_decode_num_accepted_tokens,
        )
        yield self._gauge(
            "spec_decode_mean_accepted_length",
            "Tokens that a draft brought, the drawn one included.",
            stats.spec_decode_mean_accepted_length,
        )
        positions = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Accepted by their place in the draft.",
            labels=["model_name", "position"],
        )
        for position, accepted in enumerate(stats.spec_decode_accepted_per_position):
            positions.add_metric([self.model, str(position)], accepted)
        yield positions

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family


class KeyCollector(Collector):
    """What each API key has used, by its name."""

    def __init__(self, ring: KeyRing) -> None:
        self.ring = ring

    def collect(self) -> Iterable[Metric]:
        budgets = list(self.ring.budgets.values())

        def counter(name: str, text: str, values: Iterable[tuple[list[str], float]]) -> Metric:
            more = ["limit"] if name == "key_rejected" else []
            family = CounterMetricFamily(PREFIX + name, text, labels=["key", *more])
            for labels, value in values:
                family.add_metric(labels, value)
            return family

        rows = [([budget.key.name], budget) for budget in budgets]
        yield counter(
            "key_requests", "Requests of a key that began.", [(n, b.num_requests) for n, b in rows]
        )
        yield counter(
            "key_prompt_tokens", "Of a key's requests.", [(n, b.prompt_tokens) for n, b in rows]
        )
        yield counter(
            "key_generation_tokens", "Of its answers.", [(n, b.generation_tokens) for n, b in rows]
        )
        refused = [([*n, limit], count) for n, b in rows for limit, count in b.rejected.items()]
        yield counter("key_rejected", "Requests beyond a limit of the key.", refused)
        gauge = GaugeMetricFamily(PREFIX + "key_open_sequences", "Of a key.", labels=["key"])
        for name, budget in rows:
            gauge.add_metric(name, budget.open)
        yield gauge


class Metrics:
    """One registry a server, so that several can live in one process (tests)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # CPU and memory of the API process
        PlatformCollector(registry=self.registry)
        self.model = ""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry
            )

        self.http_requests = Counter(
            PREFIX + "http_requests",
            "HTTP requests.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.finished = counter("request_success", "Finished sequences.", "finished_reason")
        self.rejected = counter("requests_rejected", "Requests not admitted.", "reason")
        self.first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between the tokens of a stream.", PER_TOKEN
        )
        self._token_gaps = self.inter_token  # of the one model, once it is known
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean of a request after its first.", PER_TOKEN
        )
        self.whole = histogram("e2e_request_latency_seconds", "Arrival to last token.", WHOLE)
        self.queue = histogram("request_queue_time_seconds", "Arrival to first step.", WHOLE)
        self.prompt_size = histogram("request_prompt_tokens", "Prompt tokens.", TOKENS)
        self.output_size = histogram("request_generation_tokens", "Generated tokens.", TOKENS)

    def watch(self, engine: AsyncLLMEngine, model: str) -> None:
        """Called when the model is known: from then on every series is there, at 0."""
        self.model = model
        self._token_gaps = self.inter_token.labels(model)
        for metric in (self.prompt_tokens, self.generation_tokens, self.first_token,
                       self.per_token, self.whole, self.queue, self.prompt_size,
                       self.output_size):  # fmt: skip
            metric.labels(model)
        self.registry.register(EngineCollector(engine, model))

    def watch_keys(self, ring: KeyRing) -> None:
        self.registry.register(KeyCollector(ring))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def token_gap(self, seconds: float, tokens: int) -> None:
        """`tokens` arrived together, `seconds` after the ones before."""
        for _ in range(tokens):
            self._token_gaps.observe(seconds / tokens)

    def request_done(self, usage: Usage, outputs: Iterable[CompletionOutput]) -> None:
        model = self.model
        self.prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self.generation_tokens.labels(model).inc(usage.completion_tokens)
        self.prompt_size.labels(model).observe(usage.prompt_tokens)
        for output in outputs:
            self.finished.labels(model, output.finish_reason or "error").inc()
            self.output_size.labels(model).observe(len(output.token_ids))
            for histogram, value in self._times(output):
                if value is not None:
                    histogram.labels(model).observe(max(0.0, value))

    def _times(self, output: CompletionOutput) -> Iterator[tuple[Histogram, float | None]]:
        times = output.timings
        yield self.first_token, times.first_token
        yield self.per_token, times.per_token
        yield self.whole, times.total
        yield self.queue, times.queue

    def request_rejected(self, reason: str) -> None:
        self.rejected.labels(self.model, reason).inc()

    def abandoned(self, reason: str, count: int) -> None:
        """Sequences that ended without an output: `abort` or `error`."""
        self.finished.labels(self.model, reason).inc(count)
