"""Create the models of a server and their metrics from the configuration."""

from collections.abc import Iterable
from dataclasses import replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llaisys.common.machine_limits import available_memory
from llaisys.server.config import ModelLimits
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.engine_client.start import EngineProcess
from llaisys.server.generation.service import Service, SharedState
from llaisys.server.metrics import PREFIX
from llaisys.server.models.collectors import EngineCollector, KeyCollector, LlamaCollector
from llaisys.server.models.manager import ModelManager, Models, check_model
from llaisys.server.models.served import SingleModel, State

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
    return manager


class ModelCollector(Collector):
    """State, memory and load counts of each model."""

    def __init__(self, manager: ModelManager) -> None:
        self.manager = manager

    def collect(self) -> Iterable[Metric]:
        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(PREFIX + name, text, labels=labels)

        def counter(name: str, text: str) -> CounterMetricFamily:
            return CounterMetricFamily(PREFIX + name, text, labels=["model_name"])

        budget = gauge("models_memory_budget_bytes", "Memory budget of all engines.")
        budget.add_metric([], self.manager.budget)
        reserved = gauge("models_memory_reserved_bytes", "Reserved bytes of the budget.")
        reserved.add_metric([], self.manager.reserved)
        state = gauge("model_state", "1 for the current state of a model.", "model_name", "state")
        memory = gauge("model_memory_estimated_bytes", "Estimated memory of a model.", "model_name")
        loads = counter("model_loads", "Model loads.")
        unloads = counter("model_unloads", "Model unloads.")
        failures = counter("model_failures", "Failed loads and engine deaths.")
        for model in self.manager.models:
            for one in State:
                state.add_metric([model.name, one.value], float(model.state is one))
            memory.add_metric([model.name], model.estimate)
            loads.add_metric([model.name], model.num_loads)
            unloads.add_metric([model.name], model.num_unloads)
            failures.add_metric([model.name], model.num_failures)
        yield from (budget, reserved, state, memory, loads, unloads, failures)
