"""Numbers that others keep, read when somebody asks for the metrics: of engines and of keys."""

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
    """The part of a Replica that is read here."""

    index: int
    is_up: bool
    restarts: int

    @property
    def stats(self) -> EngineStats: ...


class MeasuredEngine(Protocol):
    """The part of AsyncLLMEngine that is read here."""

    @property
    def replicas(self) -> Sequence[MeasuredReplica]: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def usage(self) -> tuple[float, int]: ...


class MeasuredModel(Protocol):
    """A model and its engine; None while it has none."""

    @property
    def metric_name(self) -> str: ...

    @property
    def engine_or_none(self) -> MeasuredEngine | None: ...


GAUGES = {
    "num_requests_running": "Sequences that run.",
    "num_requests_waiting": "Sequences that wait.",
    "kv_cache_usage_perc": "KV blocks in use, 1 = all.",
    "kv_cache_blocks": "KV blocks.",
    "kv_cache_blocks_used": "KV blocks in use.",
    "kv_cache_blocks_cached": "Unused KV blocks with a known prefix.",
    "kv_cache_bytes": "Bytes of the KV cache, of one rank.",
    "kv_host_blocks": "Places of evicted KV blocks in CPU memory.",
    "kv_host_blocks_used": "Those that hold one.",
    "kv_host_bytes": "Bytes of them all, of one rank.",
    "engine_resident_memory_bytes": "Of the engine process.",
    "spec_decode_mean_accepted_length": "Tokens that a draft brought, the drawn one included.",
}
COUNTERS = {
    "engine_cpu_seconds": "CPU time of the engine process.",
    "engine_steps": "Steps of the engine.",
    "num_preemptions": "Preemptions.",
    "num_context_shifts": "Context shifts.",
    "prefix_cache_queries": "Prompt tokens looked up.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prefix_cache_host_hits": "Those of them that were brought back from CPU memory.",
    "kv_blocks_saved": "KV blocks copied to CPU memory when they were evicted.",
    "kv_blocks_brought_back": "KV blocks copied back from there.",
    "spec_decode_num_drafts": "Drafts verified.",
    "spec_decode_num_draft_tokens": "Their tokens.",
    "spec_decode_num_accepted_tokens": "Those that were accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "Accepted by their place in the draft.",
    "worker_errors": "Calls that raised in a worker.",
    "executor_timeouts": "Calls that a worker did not answer.",
    "engine_stage_seconds": "Time in a stage.",
    "drawn_rows": "Rows of logits that were drawn from: on the device, or as a whole on the host.",
}
LABELS = {
    "engine_stage_seconds": "stage",
    "drawn_rows": "place",
    "spec_decode_num_accepted_tokens_per_pos": "position",
}

Counts = Counter[tuple[str, str]]  # (metric, value of its own label or "") -> count


def gauges_of(engine: MeasuredEngine) -> dict[str, float]:
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
        "engine_resident_memory_bytes": rss,
        "spec_decode_mean_accepted_length": stats.spec_decode_mean_accepted_length,
    }


def counts_of(engine: MeasuredEngine) -> Counts:
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
    for place, rows in stats.draws.items():
        counts["drawn_rows", place] = rows
    for position, accepted in enumerate(stats.spec_decode_accepted_per_position):
        counts["spec_decode_num_accepted_tokens_per_pos", str(position)] = accepted
    found: Counts = Counter()
    found.update(counts)  # seconds are no integers
    return found


class EngineCollector(Collector):
    """Of all models that have a name. Counters go on where the engine before ended: `retire` adds
    up what it had."""

    def __init__(self, models: Iterable[MeasuredModel]) -> None:
        self.models = models
        self._past: dict[str, Counts] = {}

    def retire(self, model: str, engine: MeasuredEngine) -> None:
        """Keep the counters of an engine that is about to end; its model has none afterwards."""
        self._past.setdefault(model, Counter()).update(counts_of(engine))

    def collect(self) -> Iterable[Metric]:
        engines = [(m.metric_name, m.engine_or_none) for m in self.models if m.metric_name]
        yield from self._gauges([(name, gauges_of(e)) for name, e in engines if e is not None])
        totals = {}
        for name, engine in engines:
            totals[name] = Counter(self._past.get(name, Counter()))
            if engine is not None:
                totals[name].update(counts_of(engine))
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
    "replica_up": ("1 when it works.", lambda replica: float(replica.is_up)),
    "replica_requests_running": ("Sequences.", lambda replica: replica.stats.num_running),
    "replica_requests_waiting": ("Sequences.", lambda replica: replica.stats.num_waiting),
}


GPU_GAUGES: dict[str, tuple[str, Callable[[GpuUsage], float]]] = {
    "gpu_memory_used_bytes": ("Of the whole GPU.", lambda gpu: gpu.memory_used),
    "gpu_memory_total_bytes": ("Of the GPU.", lambda gpu: gpu.memory_total),
    "gpu_usage_perc": ("How much of the time it computes, 1 = always.", lambda gpu: gpu.busy),
}


class GpuCollector(Collector):
    """Of the GPUs that engines compute on; nothing where they compute on the CPU."""

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
            known = [(model, gpu) for model, gpu in rows if value(gpu) >= 0]
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name", "gpu"])
            for model, gpu in known:
                gauge.add_metric([model, str(gpu.index)], value(gpu))
            if known:
                yield gauge


class ReplicaCollector(Collector):
    """Of each engine of a model that has several."""

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
            PREFIX + "replica_restarts", "Since the server began.", labels=labels
        )
        for model, replica in rows:
            restarts.add_metric([model, str(replica.index)], replica.restarts)
        yield restarts


class KeyCollector(Collector):
    """What each API key has used, by its name."""

    def __init__(self, ring: KeyRing) -> None:
        self.ring = ring

    def collect(self) -> Iterable[Metric]:
        rows = [(budget.key.name, budget) for budget in self.ring.budgets.values()]

        def counter(name: str, text: str, values: Iterable[tuple[str, float]]) -> Metric:
            family = CounterMetricFamily(PREFIX + name, text, labels=["key"])
            for key, value in values:
                family.add_metric([key], value)
            return family

        yield counter(
            "key_requests", "Requests of a key that began.", [(n, b.num_requests) for n, b in rows]
        )
        yield counter(
            "key_prompt_tokens", "Of a key's requests.", [(n, b.prompt_tokens) for n, b in rows]
        )
        yield counter(
            "key_generation_tokens", "Of its answers.", [(n, b.generation_tokens) for n, b in rows]
        )
        refused = CounterMetricFamily(
            PREFIX + "key_rejected", "Requests beyond a limit of the key.", labels=["key", "limit"]
        )
        gauge = GaugeMetricFamily(PREFIX + "key_open_sequences", "Of a key.", labels=["key"])
        for name, budget in rows:
            gauge.add_metric([name], budget.open)
            for limit, count in budget.rejected.items():
                refused.add_metric([name, limit], count)
        yield refused
        yield gauge
