"""metrics.md, from the registry of the server."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from llaisys.common.types import GpuUsage
from llaisys.server.metrics import RequestTotals
from llaisys.server.models.collectors import LlamaCollector, gpu_metrics, replica_metrics
from llaisys.server.route.app import RouterApp
from llaisys.server.route.config import RouteConfig
from reference_pages.application import NAMES, shared_state
from reference_pages.markdown import code, page, prose, table

SECTIONS = {
    "llaisys:route_": "llaisys route",
    "llaisys:": "Server and engine",
    "llamacpp:": "Names of llama.cpp",
    "": "API process",
}
TEXTS = {"llamacpp:": "Of a server with one model.", "": "Of the Prometheus client library."}


def metrics_page() -> str:
    families: dict[str, Any] = {}
    labels: dict[str, Any] = {}
    router = RouterApp(RouteConfig(replicas=("http://localhost",)))
    for registry in (shared_state(*NAMES)[0].metrics.registry, _others(), router.registry):
        for family in registry.collect():
            families.setdefault(family.name, family)
        for metric in registry._collector_to_names:  # series without a value have no sample
            labels[getattr(metric, "_name", "")] = getattr(metric, "_labelnames", ())
    parts, seen = [], set()
    for prefix, title in SECTIONS.items():
        own = [name for name in sorted(families) if name.startswith(prefix) and name not in seen]
        seen |= set(own)
        rows = [_row(families[name], labels.get(name, ())) for name in own]
        columns = ["Name", "Type", "Labels", "Description"]
        parts += [f"## {title}", TEXTS.get(prefix, ""), table(columns, rows)]
    return page(
        "Metrics",
        prose(
            "`GET /metrics` is Prometheus text. Names follow vLLM, with the prefix `llaisys:`. "
            "A histogram has the series `_bucket`, `_sum` and `_count`."
        ),
        *parts,
    )


class _Engines(Collector):
    def __init__(self, models: Any) -> None:
        self.models = models

    def collect(self) -> Iterable[Metric]:
        return [*replica_metrics(self.models), *gpu_metrics(self.models)]


def _others() -> CollectorRegistry:
    """The metrics that need an engine: of replicas, of GPUs, of llama.cpp's names."""
    stats = SimpleNamespace(num_running=0, num_waiting=0, gpus=[GpuUsage(0, 1, 2, 0.5)])
    replica = SimpleNamespace(index=0, is_up=True, restarts=0, stats=stats)
    engine = SimpleNamespace(replicas=[replica], stats=stats)
    models: Any = [SimpleNamespace(metric_name="model", engine_or_none=engine)]
    registry = CollectorRegistry()
    registry.register(_Engines(models))
    registry.register(LlamaCollector(RequestTotals(), []))
    return registry


def _row(family: Any, declared: Iterable[str]) -> tuple[str, str, str, str]:
    name = family.name + ("_total" if family.type == "counter" else "")
    labels = dict.fromkeys(declared)
    labels |= dict.fromkeys(label for sample in family.samples for label in sample.labels)
    shown = ", ".join(code(label) for label in labels if label != "le")
    return code(name), family.type, shown, family.documentation
