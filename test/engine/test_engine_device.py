"""The device of an engine: options that only the CPU supports, ranks, replicas, processes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from engine_fakes import make_config
from error_helpers import invalid_input

from llaisys.engine.config import EngineConfig
from llaisys.engine.executor import device_choice, uni
from llaisys.engine.executor.device_choice import resolve_device
from llaisys.engine.llm_engine import LLMEngine
from llaisys.entrypoints.llm import LLM
from llaisys.libllaisys.cuda_support import CudaProblem, CudaSupport
from llaisys.models import device
from llaisys.models.device import DeviceChoice
from llaisys.server.engine_client import process
from llaisys.server.engine_client.messages import EngineSetup
from llaisys.server.engine_client.replicas.ray_relay import replica_needs


class FakeGpus:
    """Stands for `choose_device` and `require_cuda` on a machine with a number of GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> None:
        self.count = count
        self.asked: list[tuple[tuple[int, ...], int]] = []
        monkeypatch.delenv("LLAISYS_DEVICE", raising=False)
        monkeypatch.setattr(device_choice, "choose_device", self.choose)
        monkeypatch.setattr(device_choice, "require_cuda", self.require)

    def choose(self, ids: Any, ranks: int, cpu_reason: str) -> DeviceChoice:
        if cpu_reason:
            return DeviceChoice("cpu", cpu_reason)
        self.asked.append((tuple(ids), ranks))
        if max(ids) >= self.count:
            return DeviceChoice("cpu", "too few GPUs")
        return DeviceChoice("cuda", "a fake GPU", self.count)

    def require(self, ids: Any, ranks: int) -> DeviceChoice:
        self.asked.append((tuple(ids), ranks))
        return DeviceChoice("cuda", "as requested", self.count)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    return FakeGpus(monkeypatch)


def test_auto_is_the_default_of_the_configuration() -> None:
    assert EngineConfig().device == "auto" and EngineConfig(device="nvidia").device == "cuda"
    with invalid_input("device"):
        EngineConfig(device="abacus")


def test_auto_uses_the_gpu_and_says_so_once(
    gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "llaisys.device"):
        config = resolve_device(EngineConfig(model="m"))
        assert config.device == "cuda" and resolve_device(config).device == "cuda"
    assert caplog.messages == ["device cuda: a fake GPU"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model": "mock"}, "no weights"),
        ({"adapter_class": object}, "adapter_class"),
        ({"tensor_parallel_size": 2}, "too few GPUs"),
        ({"tensor_parallel_device_ids": (1,)}, "too few GPUs"),
    ],
)
def test_options_that_cuda_does_not_support_select_the_cpu(
    gpus: FakeGpus, caplog: pytest.LogCaptureFixture, options: dict[str, Any], reason: str
) -> None:
    with caplog.at_level(logging.INFO, "llaisys.device"):
        config = resolve_device(EngineConfig.of(**options))
    assert config.device == "cpu" and len(caplog.messages) == 1
    assert caplog.messages[0].startswith("device cpu: ") and reason in caplog.messages[0]


def test_ray_ranks_need_one_gpu_on_the_node_of_the_engine(gpus: FakeGpus) -> None:
    """Ray reserves the GPUs of the others, on any node."""
    options = {"distributed_executor_backend": "ray", "tensor_parallel_size": 4}
    for requested in ("auto", "cuda"):
        config = resolve_device(EngineConfig.of(device=requested, **options), 1, 2)
        assert config.device == "cuda"
        assert config.parallel.tensor_parallel_device_ids == (0, 1, 2, 3)
    assert gpus.asked == [((0,), 4)] * 2


def test_8_bit_kv_does_not_select_the_cpu(gpus: FakeGpus) -> None:
    for dtype in ("q8", "fp8"):
        assert resolve_device(EngineConfig.of(kv_cache_dtype=dtype)).device == "cuda"


@pytest.mark.parametrize(
    ("device", "options", "budget"),
    [
        ("cpu", {}, 2048),
        ("cuda", {}, 4096),
        ("cpu", {"max_num_seqs": 3000}, 3000),
        ("cuda", {"max_num_seqs": 5000}, 5000),
        ("cuda", {"max_num_batched_tokens": 512}, 512),
    ],
)
def test_the_token_budget_depends_on_the_device(
    gpus: FakeGpus, device: str, options: dict[str, int], budget: int
) -> None:
    config = resolve_device(EngineConfig.of(device=device, **options))
    assert config.scheduler.token_budget == budget


def test_a_requested_device_is_not_logged(gpus: FakeGpus, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "llaisys.device"):
        assert resolve_device(EngineConfig(device="cpu")).device == "cpu"
        assert resolve_device(EngineConfig(device="cuda")).device == "cuda"
    assert not caplog.messages and gpus.asked == [((0,), 1)]


def test_llaisys_device_replaces_auto(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAISYS_DEVICE", "cpu")
    assert resolve_device(EngineConfig()).device == "cpu" and not gpus.asked
    monkeypatch.setenv("LLAISYS_DEVICE", "cuda")
    assert resolve_device(EngineConfig()).device == "cuda"
    monkeypatch.setenv("LLAISYS_DEVICE", "cpu")
    with invalid_input("kv_cache_dtype"):
        resolve_device(EngineConfig.of(kv_cache_dtype="fp8"))


def test_ranks_need_a_gpu_each_and_nccl(gpus: FakeGpus) -> None:
    gpus.count = 2
    config = resolve_device(EngineConfig.of(tensor_parallel_size=2))
    assert config.device == "cuda" and gpus.asked == [((0, 1), 2)]
    assert config.parallel.tensor_parallel_device_ids == (0, 1)


def test_replicas_get_gpus_of_their_own(gpus: FakeGpus) -> None:
    gpus.count = 4
    config = EngineConfig.of(tensor_parallel_size=2)
    ids = [
        resolve_device(config, index, 2).parallel.tensor_parallel_device_ids for index in range(2)
    ]
    assert ids == [(0, 1), (2, 3)] and gpus.asked == [((0, 1, 2, 3), 2)] * 2
    chosen = EngineConfig.of(tensor_parallel_device_ids=(3,))  # the user's choice stays
    assert resolve_device(chosen, 1, 2).parallel.tensor_parallel_device_ids == (3,)


def test_replicas_without_a_gpu_each_use_the_cpu_unless_cuda_is_requested(gpus: FakeGpus) -> None:
    assert resolve_device(EngineConfig(), 1, 2).device == "cpu"
    shared = resolve_device(EngineConfig(device="cuda"), 1, 2)
    assert shared.device == "cuda" and shared.parallel.tensor_parallel_device_ids == (0,)


def test_replicas_on_ray_reserve_gpus_where_the_cluster_has_some() -> None:
    def needs(gpus: float, **options: Any) -> dict[str, float]:
        config = EngineConfig.of(n_threads=2, **options)
        return replica_needs(config, {"CPU": 8, "GPU": gpus})

    assert needs(4, model="x") == {"CPU": 2, "GPU": 1}
    assert needs(0, model="x") == needs(4, model="x", device="cpu") == {"CPU": 2}
    assert needs(0, model="x", device="cuda") == {"CPU": 2, "GPU": 1}
    assert needs(4, model="mock") == {"CPU": 2}
    two = {"model": "x", "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    assert needs(4, **two) == {"CPU": 4, "GPU": 2}
    assert needs(4, **two, tensor_parallel_device_ids=(0, 0)) == {"CPU": 4, "GPU": 1}


def test_llm_resolves_the_device_before_workers_exist(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in an executor of its own, and with it in the ranks, which get its configuration."""
    seen: list[str] = []

    class Stop(Exception):
        pass

    def make_worker(config: EngineConfig, *_: Any, **__: Any) -> None:
        seen.append(config.device)
        raise Stop

    monkeypatch.setattr(uni, "Worker", make_worker)
    for make in (
        LLM,
        lambda: LLMEngine(EngineConfig()),
        lambda: uni.UniProcExecutor(EngineConfig()),
    ):
        with pytest.raises(Stop):
            make()
    assert seen == ["cuda"] * 3


@pytest.mark.parametrize(("waits", "replica", "expected"), [(False, 0, "cuda"), (False, 1, "cuda"),
                                                            (True, 0, "cpu")])  # fmt: skip
def test_an_engine_process_resolves_the_device_of_its_replica(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    waits: bool, replica: int, expected: str,
) -> None:  # fmt: skip
    """One of several models, which share the memory, is on the CPU unless CUDA is requested."""
    gpus.count = 2
    setup = EngineSetup(
        input_address="", output_address="", socket_directory="", heartbeat_interval=1.0,
        max_failed_steps=1, log_level="info", log_format="text", engine=EngineConfig().to_wire(),
        wait_for_memory=waits, replica=replica, replicas=1 if waits else 2,
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "llaisys.device"):
        config = process.engine_config_of(setup)
    assert config.device == expected
    assert config.parallel.tensor_parallel_device_ids == (replica,)
    assert len(caplog.messages) == (replica == 0)


def test_model_info_names_the_device() -> None:
    engine = LLMEngine(make_config())
    assert engine.model_info.device == "cpu" and engine.config.device == "cpu"
    engine.close()


def test_cuda_without_support_is_refused_by_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = CudaProblem("no NVIDIA driver was found", "install it")
    monkeypatch.setattr(device, "find_cuda", lambda *_: CudaSupport(problem))
    with invalid_input("device"):
        LLM(device="cuda")
