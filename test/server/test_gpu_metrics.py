"""GPU memory and utilization: from NVML and the runtime through EngineStats to the metrics."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine_fakes import make_engine
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from llaisys.common.types import GpuUsage
from llaisys.libllaisys import nvml
from llaisys.libllaisys.nvml import NvmlDevice
from llaisys.models import device
from llaisys.models.device import GpuMonitor
from llaisys.server.engine_client.messages import EngineStats
from llaisys.server.engine_client.replicas.replica import total, without_gauges
from llaisys.server.models.collectors import gpu_metrics

GIB = 1 << 30


class FakeNvml:
    """A fake NVML with two GPUs, by index and UUID."""

    def __init__(self, percent: int = 37, code: int = 0) -> None:
        self.percent, self.code = percent, code
        self.asked: list[Any] = []

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, found: Any) -> int:
        self.asked.append(index)
        found._obj.value = 100 + index
        return 0 if index < 2 else 6

    def nvmlDeviceGetHandleByUUID(self, name: bytes, found: Any) -> int:
        self.asked.append(name)
        found._obj.value = 100
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, rates: Any) -> int:
        assert handle.value in (100, 101)
        rates._obj.gpu = self.percent
        return self.code


@pytest.mark.parametrize(
    ("visible", "device_id", "asked"),
    [(None, 1, 1), ("1,0", 1, 0), ("GPU-4f, GPU-5a", 1, b"GPU-5a"), ("0", 0, 0)],
)
def test_gpu_index_follows_cuda_visible_devices(monkeypatch, visible, device_id, asked):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    library = FakeNvml()
    assert NvmlDevice(device_id, library).utilization() == 0.37 and library.asked == [asked]


def test_missing_nvml_values_are_unknown(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert NvmlDevice(0, FakeNvml(code=3)).utilization() is None
    assert NvmlDevice(5, FakeNvml()).utilization() is None
    monkeypatch.setattr(nvml, "LIBRARY", "libno-such-thing.so.1")
    assert NvmlDevice(0).utilization() is None


def test_sample_has_memory_and_utilization(monkeypatch):
    monkeypatch.setattr(device, "device_memory", lambda name, number: (3 * GIB, 10 * GIB))
    monkeypatch.setattr(device, "NvmlDevice", lambda number: NvmlDevice(number, FakeNvml()))
    assert GpuMonitor("cuda", 1).read() == GpuUsage(1, 7 * GIB, 10 * GIB, 0.37)


def test_cpu_engine_has_no_gpu():
    engine = make_engine()
    assert engine.core.executor.gpu_usage() == []
    engine.close()


@dataclass
class Model:
    metric_name: str
    stats: EngineStats = field(default_factory=EngineStats)

    @property
    def engine_or_none(self) -> Model:
        return self


def test_metrics_label_the_gpu_and_are_absent_on_cpu():
    model = Model("m", EngineStats(gpus=[GpuUsage(0, 7, 10, 0.5), GpuUsage(1, 8, 10)]))
    registry = CollectorRegistry()

    class Gpus(Collector):
        def collect(self) -> Any:
            return gpu_metrics([Model("cpu"), model])

    registry.register(Gpus())
    text = generate_latest(registry).decode()
    assert 'llaisys:gpu_memory_used_bytes{gpu="1",model_name="m"} 8.0' in text
    assert 'llaisys:gpu_usage_perc{gpu="0",model_name="m"} 0.5' in text
    assert 'gpu_usage_perc{gpu="1"' not in text and "cpu" not in text
    model.stats = EngineStats()
    assert "gpu" not in generate_latest(registry).decode()


def test_gpus_of_replicas_are_concatenated():
    one, other = EngineStats(gpus=[GpuUsage(0, 1, 2)]), EngineStats(gpus=[GpuUsage(1, 3, 4)])
    assert total([one, other]).gpus == [GpuUsage(0, 1, 2), GpuUsage(1, 3, 4)]
    assert without_gauges(one).gpus == []
