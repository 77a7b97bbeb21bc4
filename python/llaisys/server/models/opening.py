"""Create the models of a server and their metrics from the configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llaisys.common.machine_limits import available_memory
from llaisys.server.collectors import (
    EngineCollector,
    GpuCollector,
    KeyCollector,
    ReplicaCollector,
    metric_family,
)
from llaisys.server.config import ModelLimits
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.engine_client.start import EngineProcess
from llaisys.server.llamacpp.metrics import LlamaCollector
from llaisys.server.models.manager import ModelManager, Models, check_model
from llaisys.server.models.served import SingleModel, State
from llaisys.server.service import Service, SharedState

BUDGET_FRACTION = 0.8  # of available memory, without --memory-budget


def memory_budget(limits: ModelLimits) -> int:
    """Return the bytes for the engines of all models: the option, or a part of the memory that the
    machine and the control group leave."""
    return limits.memory_budget or int(BUDGET_FRACTION * available_memory())


def open_models(shared: SharedState, process: EngineProcess | None) -> Models:
    """Create the models. `process`: the started engine of a single model; None with several."""
    config = shared.config
    shared.metrics.register(KeyCollector(shared.keys))
    if process is not None:
        service = Service(shared, config)
        service.engine_or_none = AsyncLLMEngine(config, process)
        shared.metrics.register(EngineCollector([service]))
        shared.metrics.register(ReplicaCollector([service]))
        shared.metrics.register(GpuCollector([service]))
        shared.metrics.register(LlamaCollector(shared.metrics.totals, [service]))
        return SingleModel(service)
    services = [
        Service(shared, replace(config, engine=entry.engine, served_model_names=entry.names))
        for entry in config.models
    ]
    limits = config.model_limits
    engines = EngineCollector(services)
    manager = ModelManager(
        services,
        memory_budget(limits),
        limits.keep_alive,
        limits.load_timeout,
        max_waiting=max(1, config.limits.max_queued),
        check=check_model,
        on_engine_end=lambda service, engine: engines.retire(service.metric_name, engine),
    )
    for service in services:
        service.metrics.create_series()
    shared.metrics.register(engines)
    shared.metrics.register(ModelCollector(manager))
    shared.metrics.register(GpuCollector(services))
    return manager


COUNTERS = {
    "num_loads": ("model_loads", "Model loads."),
    "num_unloads": ("model_unloads", "Model unloads."),
    "num_failures": ("model_failures", "Failed loads and engine deaths."),
}  # by the field of ServedModel


class ModelCollector(Collector):
    """State, memory and load counts of each model."""

    def __init__(self, manager: ModelManager) -> None:
        self.manager = manager

    def collect(self) -> Iterable[Metric]:
        def gauge(
            name: str, text: str, rows: list[tuple[list[str], float]], *labels: str
        ) -> Metric:
            return metric_family(GaugeMetricFamily, name, text, labels, rows)

        manager, models = self.manager, self.manager.models
        budget, reserved = float(manager.budget), float(manager.reserved)
        states = [([m.name, one.value], float(m.state is one)) for m in models for one in State]
        estimates = [([m.name], float(m.estimate)) for m in models]
        yield gauge("models_memory_budget_bytes", "Memory budget of all engines.", [([], budget)])
        yield gauge(
            "models_memory_reserved_bytes", "Reserved bytes of the budget.", [([], reserved)]
        )
        text = "1 for the current state of a model."
        yield gauge("model_state", text, states, "model_name", "state")
        text = "Estimated memory of a model."
        yield gauge("model_memory_estimated_bytes", text, estimates, "model_name")
        for field, (name, text) in COUNTERS.items():
            rows = [([model.name], getattr(model, field)) for model in models]
            yield metric_family(CounterMetricFamily, name, text, ["model_name"], rows)
