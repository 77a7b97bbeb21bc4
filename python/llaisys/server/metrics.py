"""Prometheus metrics with vLLM's names and the prefix `llaisys:`.

Request metrics are counted here, per model (`ModelMetrics`); engine metrics come from the engines'
latest reports (`collectors.EngineCollector`).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llaisys.common.types import CompletionOutput, Usage

PREFIX = "llaisys:"
MODEL = "model_name"  # label
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
               7.5, 10.0, 20.0, 40.0, 80.0, 160.0)  # fmt: skip
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
             1.0, 2.5, 5.0)  # fmt: skip
WHOLE = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
         50.0, 60.0, 120.0, 240.0, 480.0, 960.0)  # fmt: skip
TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))


@dataclass(slots=True)
class RequestTotals:
    """Sums over the finished requests of all models."""

    prompt_tokens: int = 0  # computed
    cached: int = 0  # prompt tokens found in the prefix cache
    prompt_seconds: float = 0.0
    predicted: int = 0
    predicted_seconds: float = 0.0
    longest: int = 0  # prompt and output tokens

    def add(self, usage: Usage, outputs: Iterable[CompletionOutput]) -> None:
        self.prompt_tokens += usage.prompt_tokens - usage.cached_tokens
        self.cached += usage.cached_tokens
        self.predicted += usage.completion_tokens
        for output in outputs:
            times, total = output.timings, output.timings.total or 0.0
            first = total if times.first_token is None else times.first_token
            self.prompt_seconds += max(0.0, first - (times.queue or 0.0))
            self.predicted_seconds += max(0.0, total - first)
            self.longest = max(self.longest, usage.prompt_tokens + len(output.token_ids))


class TokenGaps(Collector):
    """A histogram per model that counts the tokens of a delta at once: a stream has one value per
    token, all other metrics have a few per request."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds = buckets
        self._counts: dict[str, list[int]] = {}  # by model, of each bucket and of those above
        self._sums: dict[str, float] = {}

    def create(self, model: str) -> None:
        self._counts.setdefault(model, [0] * (len(self._bounds) + 1))
        self._sums.setdefault(model, 0.0)

    def add(self, model: str, seconds: float, tokens: int) -> None:
        """Count `tokens` that arrived together, `seconds` after the previous ones."""
        if model not in self._counts:
            self.create(model)
        self._counts[model][bisect_left(self._bounds, seconds / tokens)] += tokens
        self._sums[model] += seconds

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=[MODEL])
        bounds = [*map(str, self._bounds), "+Inf"]
        for model, counts in self._counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([model], buckets, self._sums[model])
        yield family


class Metrics:
    """Metrics of one server. The registry is its own: tests run several servers in a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.totals = RequestTotals()
        ProcessCollector(registry=self.registry)  # CPU and memory of the API process
        PlatformCollector(registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, [MODEL], buckets=buckets, registry=self.registry)

        self.http_requests = counter("http_requests", "HTTP requests.", "method", "route", "status")
        text = "Fields and tools of requests that were ignored, each name once a request."
        self.ignored_fields = counter("ignored_fields", text, "route", "kind")
        text = (
            "Responses of /v1/responses that were answered but not stored (full disk or storage)."
        )
        self.responses_not_stored = counter("responses_not_stored", text)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens.", MODEL)
        self.generation_tokens = counter("generation_tokens", "Generated tokens.", MODEL)
        self.finished = counter("request_success", "Finished sequences.", MODEL, "finished_reason")
        self.rejected = counter(
            "requests_rejected", "Requests rejected by admission.", MODEL, "reason"
        )
        self.first_token = histogram(
            "time_to_first_token_seconds", "Time from arrival to first token.", FIRST_TOKEN
        )
        text = "Time between output tokens of a stream."
        self.inter_token = TokenGaps(PREFIX + "inter_token_latency_seconds", text, PER_TOKEN)
        self.register(self.inter_token)
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token after the first.",
            PER_TOKEN,
        )
        self.whole = histogram(
            "e2e_request_latency_seconds", "Time from arrival to last token.", WHOLE
        )
        self.queue = histogram(
            "request_queue_time_seconds", "Time from arrival to first step.", WHOLE
        )
        self.prompt_size = histogram("request_prompt_tokens", "Prompt tokens per request.", TOKENS)
        self.output_size = histogram("request_generation_tokens", "Tokens per output.", TOKENS)

    def register(self, collector: Collector) -> None:
        """Collect from it at every scrape."""
        self.registry.register(collector)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class ModelMetrics:
    """Request metrics of one model. The model name may be unknown at first; `create_series`
    initialises every series to 0 once it is known."""

    def __init__(self, metrics: Metrics, name: Callable[[], str]) -> None:
        self.all = metrics
        self._name = name

    @property
    def model(self) -> str:
        return self._name()

    def create_series(self) -> None:
        every = self.all
        every.inter_token.create(self.model)
        for metric in (every.prompt_tokens, every.generation_tokens, every.first_token,
                       every.per_token, every.whole, every.queue, every.prompt_size,
                       every.output_size):  # fmt: skip
            metric.labels(self.model)

    def record_tokens(self, seconds: float, tokens: int) -> None:
        """Record `tokens` that arrived together, `seconds` after the previous ones."""
        self.all.inter_token.add(self.model, seconds, tokens)

    def request_done(self, usage: Usage, outputs: Iterable[CompletionOutput]) -> None:
        every, model = self.all, self.model
        outputs = list(outputs)
        every.totals.add(usage, outputs)
        every.prompt_tokens.labels(model).inc(usage.prompt_tokens)
        every.generation_tokens.labels(model).inc(usage.completion_tokens)
        every.prompt_size.labels(model).observe(usage.prompt_tokens)
        for output in outputs:
            every.finished.labels(model, output.finish_reason or "error").inc()
            every.output_size.labels(model).observe(len(output.token_ids))
            times = output.timings
            for histogram, value in (
                (every.first_token, times.first_token),
                (every.per_token, times.per_token),
                (every.whole, times.total),
                (every.queue, times.queue),
            ):
                if value is not None:
                    histogram.labels(model).observe(max(0.0, value))

    def request_rejected(self, reason: str) -> None:
        self.all.rejected.labels(self.model, reason).inc()

    def abandoned(self, reason: str, count: int) -> None:
        """Count sequences that ended without an output; `reason` is `abort` or `error`."""
        self.all.finished.labels(self.model, reason).inc(count)
