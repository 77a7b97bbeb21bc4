"""From the configuration to the models of a server, and to what the metrics say of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llaisys.common.machine_memory import available_memory
from llaisys.server.collectors import EngineCollector, GpuCollector, KeyCollector, ReplicaCollector
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.engine_client.start import EngineProcess
from llaisys.server.llamacpp.metrics import LlamaCollector
from llaisys.server.metrics import PREFIX
from llaisys.server.models.directory import ModelDirectory, Models
from llaisys.server.models.one import OneModel
from llaisys.server.models.served import State
from llaisys.server.service import Service, Shared

SHARE_OF_AVAILABLE = 0.8


def open_models(shared: Shared, process: EngineProcess | None) -> Models:
    """`process`: the engine of the one model, already started; None: there are several."""
    config = shared.config
    shared.metrics.watch(KeyCollector(shared.keys))
    if process is not None:
        service = Service(shared, config)
        service.engine_or_none = AsyncLLMEngine(config, process)
        shared.metrics.watch(EngineCollector([service]))
        shared.metrics.watch(ReplicaCollector([service]))
        shared.metrics.watch(GpuCollector([service]))
        shared.metrics.watch(LlamaCollector(shared.metrics.totals, [service]))
        return OneModel(service)
    services = [
        Service(shared, replace(config, engine=entry.engine, served_model_names=entry.names))
        for entry in config.models
    ]
    limits = config.model_limits
    engines = EngineCollector(services)
    directory = ModelDirectory(
        services,
        limits.memory_budget or int(SHARE_OF_AVAILABLE * available_memory()),
        limits.keep_alive,
        limits.load_timeout,
        max_waiting=max(1, config.limits.max_queued),
        on_engine_end=lambda service, engine: engines.retire(service.metric_name, engine),
    )
    for service in services:
        service.metrics.named()
    shared.metrics.watch(engines)
    shared.metrics.watch(ModelCollector(directory))
    shared.metrics.watch(GpuCollector(services))
    return directory


class ModelCollector(Collector):
    """Which models are there, and what they take."""

    def __init__(self, directory: ModelDirectory) -> None:
        self.directory = directory

    def collect(self) -> Iterable[Metric]:
        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(PREFIX + name, text, labels=labels)

        def counter(name: str, text: str) -> CounterMetricFamily:
            return CounterMetricFamily(PREFIX + name, text, labels=["model_name"])

        budget = gauge("models_memory_budget_bytes", "Of all engines together.")
        budget.add_metric([], self.directory.budget)
        reserved = gauge("models_memory_reserved_bytes", "Of the budget, given out.")
        reserved.add_metric([], self.directory.reserved)
        state = gauge("model_state", "1: the model is in this state.", "model_name", "state")
        memory = gauge("model_memory_estimated_bytes", "Before it was loaded.", "model_name")
        loads = counter("model_loads", "Times that a model was loaded.")
        unloads = counter("model_unloads", "Times that it was unloaded.")
        failures = counter("model_failures", "Times that it could not be, or that it died.")
        for model in self.directory.models:
            for one in State:
                state.add_metric([model.name, one.value], float(model.state is one))
            memory.add_metric([model.name], model.estimate)
            loads.add_metric([model.name], model.num_loads)
            unloads.add_metric([model.name], model.num_unloads)
            failures.add_metric([model.name], model.num_failures)
        yield from (budget, reserved, state, memory, loads, unloads, failures)
