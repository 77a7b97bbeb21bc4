"""Prometheus collectors that read engines and API keys at scrape time; some metrics also have the
names and types of llama.cpp's server."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llaisys.common.types import GpuUsage
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.engine_client.messages import EngineStats
from llaisys.server.engine_client.replicas.replica import Replica
from llaisys.server.generation.service import Service
from llaisys.server.http.key_budgets import KeyRing
from llaisys.server.metrics import PREFIX, RequestTotals

GAUGES = {
    "num_requests_running": "Sequences in the running queue.",
    "num_requests_waiting": "Sequences in the waiting queue.",
    "kv_cache_usage_perc": "Fraction of KV blocks in use, 0 to 1.",
    "kv_cache_blocks": "KV blocks.",
    "kv_cache_blocks_used": "KV blocks in use.",
    "kv_cache_blocks_cached": "Free KV blocks that hold a cached prefix.",
    "kv_cache_bytes": "Size of the KV cache of one rank.",
    "kv_host_blocks": "Host blocks for offloaded KV blocks.",
    "kv_host_blocks_used": "Host blocks in use.",
    "kv_host_bytes": "Size of the host blocks of one rank.",
    "loras": "Loaded LoRA adapters, of all replicas.",
    "loras_in_host": "LoRA adapters in host memory.",
    "lora_slots_used": "Device slots with a LoRA adapter.",
    "engine_resident_memory_bytes": "Resident memory of the engine process.",
    "spec_decode_mean_accepted_length": "Mean tokens per verified draft, bonus token included.",
}
# Gauges whose EngineStats field has another name.
GAUGE_FIELDS = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "kv_cache_blocks": "kv_blocks",
    "kv_cache_blocks_used": "kv_blocks_used",
    "kv_cache_blocks_cached": "kv_blocks_cached",
}
CACHE_CONFIG_INFO = "Always 1; the labels are the configuration of the KV cache."
COUNTERS = {
    "engine_cpu_seconds": "CPU time of the engine process.",
    "engine_steps": "Engine steps.",
    "num_preemptions": "Preemptions.",
    "num_context_shifts": "Context shifts.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prefix_cache_host_hits": "Prompt tokens found in host blocks.",
    "kv_blocks_saved": "KV blocks offloaded to host memory.",
    "kv_blocks_restored": "KV blocks loaded back from host memory.",
    "kv_transfer_sent_blocks": "KV blocks made available to other replicas.",
    "kv_transfer_received_blocks": "KV blocks received from other replicas.",
    "kv_transfer_received_bytes": "Bytes of KV blocks received from other replicas.",
    "kv_transfer_seconds": "Time of KV transfers, from the request to the last block.",
    "kv_transfer_failures": "KV transfers that failed; the prompt was computed instead.",
    "spec_decode_num_drafts": "Verified drafts.",
    "spec_decode_num_draft_tokens": "Draft tokens.",
    "spec_decode_num_accepted_tokens": "Accepted draft tokens.",
    "spec_decode_num_accepted_tokens_per_pos": "Accepted draft tokens by position.",
    "lora_reads": "LoRA adapters read from their files.",
    "lora_slot_loads": "LoRA adapters loaded into a device slot.",
    "lora_failures": "LoRA adapters that could not be read.",
    "worker_errors": "Worker calls that raised an exception.",
    "executor_timeouts": "Worker calls that timed out.",
    "engine_stage_seconds": "Time in a stage of the worker's step.",
    "sampled_rows": "Sampled rows of logits, by device or host sampler.",
}
LABELS = {
    "engine_stage_seconds": "stage",
    "sampled_rows": "sampler",
    "spec_decode_num_accepted_tokens_per_pos": "position",
}

Counts = Counter[tuple[str, str]]  # (metric, label value or "") -> count


def metric_family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    labels: Iterable[str],
    rows: Iterable[tuple[list[str], float]],
) -> Metric:
    """Return a metric with a series for each row of label values and value."""
    family = kind(PREFIX + name, text, labels=list(labels))
    for values, value in rows:
        family.add_metric(values, value)
    return family


def loaded_engines(models: Iterable[Service]) -> list[tuple[str, AsyncLLMEngine]]:
    """Return the name and the engine of each model that is loaded and has a name."""
    return [
        (model.metric_name, model.engine_or_none)
        for model in models
        if model.metric_name and model.engine_or_none is not None
    ]


def engine_gauges(engine: AsyncLLMEngine) -> dict[str, float]:
    stats, (_, rss) = engine.stats, engine.usage
    own = {
        "kv_cache_usage_perc": stats.kv_usage,
        "engine_resident_memory_bytes": rss,
    }
    fields = {name: GAUGE_FIELDS.get(name, name) for name in GAUGES if name not in own}
    return own | {name: getattr(stats, field) for name, field in fields.items()}


def engine_counters(engine: AsyncLLMEngine) -> Counts:
    stats, (cpu, _) = engine.stats, engine.usage
    counts: dict[tuple[str, str], float] = {
        ("engine_cpu_seconds", ""): cpu,
        ("engine_steps", ""): stats.num_steps,
    }
    own = {name for name, _ in counts}
    for name in COUNTERS:
        if name not in LABELS and name not in own:
            counts[name, ""] = getattr(stats, name)
    for stage, seconds in stats.stage_seconds.items():
        counts["engine_stage_seconds", stage] = seconds
    for sampler, rows in stats.sample_counts.items():
        counts["sampled_rows", sampler] = rows
    for position, accepted in enumerate(stats.spec_decode_accepted_per_position):
        counts["spec_decode_num_accepted_tokens_per_pos", str(position)] = accepted
    found: Counts = Counter()
    found.update(counts)  # accepts floats; the constructor's type does not
    return found


class EngineCollector(Collector):
    """Engine metrics by model name. `retire` adds the counters of an engine that ends, so that
    they never decrease when the next engine starts at zero."""

    def __init__(self, models: Iterable[Service]) -> None:
        self.models = models
        self._retired: dict[str, Counts] = {}  # by model

    def retire(self, model: str, engine: AsyncLLMEngine) -> None:
        """Add the counters of an engine that is about to end."""
        self._retired.setdefault(model, Counter()).update(engine_counters(engine))

    def collect(self) -> Iterable[Metric]:
        engines = loaded_engines(self.models)
        gauges = [(model, engine_gauges(engine)) for model, engine in engines]
        for name, text in GAUGES.items():
            rows = [([model], values[name]) for model, values in gauges]
            yield metric_family(GaugeMetricFamily, name, text, ["model_name"], rows)
        labels = ["model_name", "cache_dtype"]
        dtypes = [(model, engine.stats.kv_cache_dtype) for model, engine in engines]
        rows = [([model, dtype], 1.0) for model, dtype in dtypes if dtype]
        yield metric_family(GaugeMetricFamily, "cache_config_info", CACHE_CONFIG_INFO, labels, rows)
        running = dict(engines)
        totals = {}
        for model in [model.metric_name for model in self.models if model.metric_name]:
            totals[model] = Counter(self._retired.get(model, Counter()))
            if model in running:
                totals[model].update(engine_counters(running[model]))
        for name, text in COUNTERS.items():
            label = [LABELS[name]] if name in LABELS else []
            counters = [
                ([model, value] if label else [model], count)
                for model, counts in totals.items()
                for (metric, value), count in counts.items()
                if metric == name
            ]
            yield metric_family(CounterMetricFamily, name, text, ["model_name", *label], counters)
        yield from replica_metrics(self.models)
        yield from gpu_metrics(self.models)


REPLICA_GAUGES: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "replica_up": ("1 while the replica is up.", lambda replica: float(replica.is_up)),
    "replica_requests_running": ("Running sequences.", lambda replica: replica.stats.num_running),
    "replica_requests_waiting": ("Waiting sequences.", lambda replica: replica.stats.num_waiting),
}


GPU_GAUGES: dict[str, tuple[str, Callable[[GpuUsage], float]]] = {
    "gpu_memory_used_bytes": ("Memory in use, by all processes.", lambda gpu: gpu.memory_used),
    "gpu_memory_total_bytes": ("Memory of the GPU.", lambda gpu: gpu.memory_total),
    "gpu_usage_perc": ("Fraction of time a kernel runs, 0 to 1.", lambda gpu: gpu.busy),
}


def gpu_metrics(models: Iterable[Service]) -> Iterable[Metric]:
    """GPU metrics; no series for engines on the CPU."""
    gpus = [(model, gpu) for model, e in loaded_engines(models) for gpu in e.stats.gpus]
    labels = ["model_name", "gpu"]
    for name, (text, value) in GPU_GAUGES.items():
        # -1: unknown
        rows = [([model, str(g.index)], value(g)) for model, g in gpus if value(g) >= 0]
        if rows:
            yield metric_family(GaugeMetricFamily, name, text, labels, rows)


def replica_metrics(models: Iterable[Service]) -> Iterable[Metric]:
    """Metrics of each replica; no series without data parallelism."""
    found = [
        ([model, str(replica.index)], replica)
        for model, engine in loaded_engines(models)
        for replica in engine.replicas
    ]
    if not found:
        return
    labels = ["model_name", "replica"]
    for name, (text, value) in REPLICA_GAUGES.items():
        rows = [(values, value(replica)) for values, replica in found]
        yield metric_family(GaugeMetricFamily, name, text, labels, rows)
    restarts = [(values, replica.restarts) for values, replica in found]
    text = "Restarts of a replica."
    yield metric_family(CounterMetricFamily, "replica_restarts", text, labels, restarts)


KEY_COUNTERS = {
    "num_requests": ("key_requests", "Requests of a key."),
    "prompt_tokens": ("key_prompt_tokens", "Prompt tokens of a key."),
    "generation_tokens": ("key_generation_tokens", "Generated tokens of a key."),
}  # by the field of KeyBudget


class KeyCollector(Collector):
    """Usage of each API key, labelled with its name."""

    def __init__(self, ring: KeyRing) -> None:
        self.ring = ring

    def collect(self) -> Iterable[Metric]:
        budgets = [(budget.key.name, budget) for budget in self.ring.budgets.values()]
        for field, (name, text) in KEY_COUNTERS.items():
            rows = [([key], getattr(budget, field)) for key, budget in budgets]
            yield metric_family(CounterMetricFamily, name, text, ["key"], rows)
        rejected = [
            ([k, limit], n) for k, budget in budgets for limit, n in budget.rejected.items()
        ]
        text, labels = "Requests rejected by a limit of the key.", ["key", "limit"]
        yield metric_family(CounterMetricFamily, "key_rejected", text, labels, rejected)
        rows = [([key], budget.open) for key, budget in budgets]
        text = "Open sequences of a key."
        yield metric_family(GaugeMetricFamily, "key_open_sequences", text, ["key"], rows)


LLAMA_PREFIX = "llamacpp:"


class CasedName(bytes):
    """A header name that is sent as written. uvicorn sends names in lower case, and scripts of
    llama.cpp compare them with case."""

    def lower(self) -> Self:
        return self


START_HEADER = CasedName(b"Process-Start-Time-Unix")


class LlamaCollector(Collector):
    """For a server with one model."""

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
            yield CounterMetricFamily(LLAMA_PREFIX + name, text, value=value)
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
            yield GaugeMetricFamily(LLAMA_PREFIX + name, text, value=value)


def with_llama_types(text: bytes) -> bytes:
    """Declare `n_tokens_max` a counter, as llama.cpp does; the client library appends _total to the
    name of a counter."""
    name = f"# TYPE {LLAMA_PREFIX}n_tokens_max ".encode()
    return text.replace(name + b"gauge", name + b"counter")


def _sum(stats: list[EngineStats], name: str) -> int:
    return sum(getattr(entry, name) for entry in stats)


def _rate(count: float, over: float) -> float:
    return count / over if over else 0.0
