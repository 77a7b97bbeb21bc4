"""Prometheus collectors that read engines and API keys at scrape time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llaisys.common.types import GpuUsage
from llaisys.server.engine_client.messages import EngineStats
from llaisys.server.keys.ring import KeyRing
from llaisys.server.metrics import PREFIX


class MeasuredReplica(Protocol):
    """The attributes of a Replica that the collectors read."""

    index: int
    is_up: bool
    restarts: int

    @property
    def stats(self) -> EngineStats: ...


class MeasuredEngine(Protocol):
    """The attributes of AsyncLLMEngine that the collectors read."""

    @property
    def replicas(self) -> Sequence[MeasuredReplica]: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def usage(self) -> tuple[float, int]: ...


class MeasuredModel(Protocol):
    """A model and its engine (None while it is unloaded)."""

    @property
    def metric_name(self) -> str: ...

    @property
    def engine_or_none(self) -> MeasuredEngine | None: ...


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


def engine_gauges(engine: MeasuredEngine) -> dict[str, float]:
    stats, (_, rss) = engine.stats, engine.usage
    return {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": stats.kv_blocks_used / stats.kv_blocks if stats.kv_blocks else 0.0,
        "kv_cache_blocks": stats.kv_blocks,
        "kv_cache_blocks_used": stats.kv_blocks_used,
        "kv_cache_blocks_cached": stats.kv_blocks_cached,
        "kv_cache_bytes": stats.kv_cache_bytes,
        "kv_host_blocks": stats.kv_host_blocks,
        "kv_host_blocks_used": stats.kv_host_blocks_used,
        "kv_host_bytes": stats.kv_host_bytes,
        "loras": stats.loras,
        "loras_in_host": stats.loras_in_host,
        "lora_slots_used": stats.lora_slots_used,
        "engine_resident_memory_bytes": rss,
        "spec_decode_mean_accepted_length": stats.spec_decode_mean_accepted_length,
    }


def engine_counters(engine: MeasuredEngine) -> Counts:
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

    def __init__(self, models: Iterable[MeasuredModel]) -> None:
        self.models = models
        self._retired: dict[str, Counts] = {}  # by model

    def retire(self, model: str, engine: MeasuredEngine) -> None:
        """Add the counters of an engine that is about to end."""
        self._retired.setdefault(model, Counter()).update(engine_counters(engine))

    def collect(self) -> Iterable[Metric]:
        engines = [(m.metric_name, m.engine_or_none) for m in self.models if m.metric_name]
        yield from self._gauges([(name, engine_gauges(e)) for name, e in engines if e is not None])
        info = GaugeMetricFamily(
            PREFIX + "cache_config_info", CACHE_CONFIG_INFO, labels=["model_name", "cache_dtype"]
        )
        for name, engine in engines:
            if engine is not None and engine.stats.kv_cache_dtype:
                info.add_metric([name, engine.stats.kv_cache_dtype], 1)
        yield info
        totals = {}
        for name, engine in engines:
            totals[name] = Counter(self._retired.get(name, Counter()))
            if engine is not None:
                totals[name].update(engine_counters(engine))
        yield from self._counters(totals)

    def _gauges(self, rows: list[tuple[str, dict[str, float]]]) -> Iterator[Metric]:
        for name, text in GAUGES.items():
            family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            for model, values in rows:
                family.add_metric([model], values[name])
            yield family

    def _counters(self, totals: dict[str, Counts]) -> Iterator[Metric]:
        for name, text in COUNTERS.items():
            label = LABELS.get(name)
            labels = ["model_name", *([label] if label else [])]
            family = CounterMetricFamily(PREFIX + name, text, labels=labels)
            for model, counts in totals.items():
                for (metric, value), count in counts.items():
                    if metric == name:
                        family.add_metric([model, *([value] if label else [])], count)
            yield family


REPLICA_GAUGES: dict[str, tuple[str, Callable[[MeasuredReplica], float]]] = {
    "replica_up": ("1 while the replica is up.", lambda replica: float(replica.is_up)),
    "replica_requests_running": ("Running sequences.", lambda replica: replica.stats.num_running),
    "replica_requests_waiting": ("Waiting sequences.", lambda replica: replica.stats.num_waiting),
}


GPU_GAUGES: dict[str, tuple[str, Callable[[GpuUsage], float]]] = {
    "gpu_memory_used_bytes": ("Memory in use, by all processes.", lambda gpu: gpu.memory_used),
    "gpu_memory_total_bytes": ("Memory of the GPU.", lambda gpu: gpu.memory_total),
    "gpu_usage_perc": ("Fraction of time a kernel runs, 0 to 1.", lambda gpu: gpu.busy),
}


class GpuCollector(Collector):
    """GPU metrics; no series for engines on the CPU."""

    def __init__(self, models: Iterable[MeasuredModel]) -> None:
        self.models = models

    def collect(self) -> Iterable[Metric]:
        rows = [
            (model.metric_name, gpu)
            for model in self.models
            if model.metric_name and model.engine_or_none is not None
            for gpu in model.engine_or_none.stats.gpus
        ]
        for name, (text, value) in GPU_GAUGES.items():
            known = [(model, gpu) for model, gpu in rows if value(gpu) >= 0]  # -1: unknown
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name", "gpu"])
            for model, gpu in known:
                gauge.add_metric([model, str(gpu.index)], value(gpu))
            if known:
                yield gauge


class ReplicaCollector(Collector):
    """Metrics of each replica; no series without data parallelism."""

    def __init__(self, models: Iterable[MeasuredModel]) -> None:
        self.models = models

    def collect(self) -> Iterable[Metric]:
        rows = [
            (model.metric_name, replica)
            for model in self.models
            if model.metric_name and model.engine_or_none is not None
            for replica in model.engine_or_none.replicas
        ]
        if not rows:
            return
        labels = ["model_name", "replica"]
        for name, (text, value) in REPLICA_GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            for model, replica in rows:
                gauge.add_metric([model, str(replica.index)], value(replica))
            yield gauge
        restarts = CounterMetricFamily(
            PREFIX + "replica_restarts", "Restarts of a replica.", labels=labels
        )
        for model, replica in rows:
            restarts.add_metric([model, str(replica.index)], replica.restarts)
        yield restarts


class KeyCollector(Collector):
    """Usage of each API key, labelled with its name."""

    def __init__(self, ring: KeyRing) -> None:
        self.ring = ring

    def collect(self) -> Iterable[Metric]:
        rows = [(budget.key.name, budget) for budget in self.ring.budgets.values()]

        def counter(name: str, text: str, values: Iterable[tuple[str, float]]) -> Metric:
            family = CounterMetricFamily(PREFIX + name, text, labels=["key"])
            for key, value in values:
                family.add_metric([key], value)
            return family

        yield counter("key_requests", "Requests of a key.", [(n, b.num_requests) for n, b in rows])
        yield counter(
            "key_prompt_tokens", "Prompt tokens of a key.", [(n, b.prompt_tokens) for n, b in rows]
        )
        yield counter(
            "key_generation_tokens",
            "Generated tokens of a key.",
            [(n, b.generation_tokens) for n, b in rows],
        )
        rejected = CounterMetricFamily(
            PREFIX + "key_rejected",
            "Requests rejected by a limit of the key.",
            labels=["key", "limit"],
        )
        gauge = GaugeMetricFamily(
            PREFIX + "key_open_sequences", "Open sequences of a key.", labels=["key"]
        )
        for name, budget in rows:
            gauge.add_metric([name], budget.open)
            for limit, count in budget.rejected.items():
                rejected.add_metric([name, limit], count)
        yield rejected
        yield gauge
