"""CPU and memory limits of control groups, from fake trees, and what follows from them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine_fakes import FakeAdapter, make_config

from llaisys.common import machine_limits
from llaisys.common.machine_limits import (
    available_memory,
    cores_within,
    cpu_quota,
    describe_cores,
    describe_memory,
    memory_left,
    usable_cores,
)
from llaisys.engine.config import CacheConfig, EngineConfig, ParallelConfig
from llaisys.engine.llm_engine import LLMEngine
from llaisys.engine.worker import model_opening
from llaisys.engine.worker.model_opening import threads_of
from llaisys.models.device import MemoryNeeds
from llaisys.server.config import ModelLimits, ServerConfig
from llaisys.server.models.opening import memory_budget

GIB = 1 << 30


class FakeGroups:
    """A directory that stands for /sys/fs/cgroup, and a file for /proc/self/cgroup."""

    def __init__(self, directory: Path) -> None:
        self.root, self.membership = directory / "cgroup", directory / "membership"
        self.root.mkdir()

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def join(self, text: str) -> tuple[Path, Path]:
        self.membership.write_text(text)
        return self.membership, self.root


@pytest.fixture
def groups(tmp_path: Path) -> FakeGroups:
    return FakeGroups(tmp_path)


@pytest.fixture
def container(groups: FakeGroups, monkeypatch: pytest.MonkeyPatch) -> FakeGroups:
    """16 CPUs are visible, 2 of them granted, and 2 GiB of 64, of which 0.5 are used."""
    groups.write("cpu.max", "200000 100000\n")
    groups.write("memory.max", f"{2 * GIB}\n")
    groups.write("memory.current", f"{GIB // 2 + GIB // 4}\n")
    groups.write("memory.stat", f"anon 5\nactive_file {GIB // 8}\ninactive_file {GIB // 8}\n")
    groups.join("0::/\n")
    place = lambda read: lambda: read(groups.membership, groups.root)  # noqa: E731
    monkeypatch.setattr(machine_limits, "cpu_quota", place(cpu_quota))
    monkeypatch.setattr(model_opening, "cpu_quota", place(cpu_quota))
    monkeypatch.setattr(machine_limits, "memory_left", place(memory_left))
    monkeypatch.setattr(machine_limits, "free_memory", lambda: 64 * GIB)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    return groups


# ---- reading -------------------------------------------------------------------------------------


def test_no_control_group_is_no_limit(groups: FakeGroups, tmp_path: Path) -> None:
    for place in ((tmp_path / "missing", tmp_path), groups.join("0::/\n"), groups.join(":\nx\n")):
        assert cpu_quota(*place) is None and memory_left(*place) is None


def test_v2_limits_are_the_smallest_on_the_way_up(groups: FakeGroups) -> None:
    for path, cpu, memory, used in (
        ("", "max 100000", "max", 900),
        ("a/", "150000 100000", "1000", 400),
        ("a/b/", "800000 100000", "5000", 4700),
    ):
        groups.write(f"{path}cpu.max", f"{cpu}\n")
        groups.write(f"{path}memory.max", f"{memory}\n")
        groups.write(f"{path}memory.current", f"{used}\n")
    assert cpu_quota(*groups.join("0::/\n")) is None
    assert memory_left(*groups.join("0::/\n")) is None
    assert cpu_quota(*groups.join("0::/a\n")) == 1.5
    assert memory_left(*groups.join("0::/a\n")) == 600
    assert cpu_quota(*groups.join("0::/a/b\n")) == 1.5
    assert memory_left(*groups.join("0::/a/b\n")) == 300
    assert cpu_quota(*groups.join("0::/a/b/missing\n")) == 1.5


def test_page_cache_is_free_and_memory_high_is_a_limit(groups: FakeGroups) -> None:
    groups.write("memory.max", "5000\n")
    groups.write("memory.high", "4000\n")
    groups.write("memory.current", "3000\n")
    groups.write("memory.stat", "anon 1500\nactive_file 700\ninactive_file 800\nbroken\n")
    assert memory_left(*groups.join("0::/\n")) == 4000 - (3000 - 1500)
    groups.write("memory.current", "9000\n")
    assert memory_left(*groups.join("0::/\n")) == 0


def test_v1_limits(groups: FakeGroups) -> None:
    groups.write("cpu,cpuacct/pod/cpu.cfs_quota_us", "300000\n")
    groups.write("cpu,cpuacct/pod/cpu.cfs_period_us", "100000\n")
    groups.write("cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    groups.write("cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    groups.write("memory/memory.limit_in_bytes", "9223372036854771712\n")
    groups.write("memory/memory.usage_in_bytes", "12345\n")
    groups.write("memory/pod/memory.limit_in_bytes", "10000\n")
    groups.write("memory/pod/memory.usage_in_bytes", "6000\n")
    groups.write("memory/pod/memory.stat", "active_file 9\ntotal_active_file 500\n")
    place = groups.join("4:memory:/pod\n3:cpuset:/pod\n2:cpu,cpuacct:/pod\n0::/pod\n")
    assert cpu_quota(*place) == 3 and memory_left(*place) == 4500
    place = groups.join("4:memory:/\n2:cpu,cpuacct:/\n")
    assert cpu_quota(*place) is None and memory_left(*place) is None


def test_a_container_with_the_path_of_the_host_uses_the_root_of_the_mount(
    groups: FakeGroups,
) -> None:
    groups.write("cpu/cpu.cfs_quota_us", "50000\n")
    groups.write("cpu/cpu.cfs_period_us", "100000\n")
    groups.write("memory/memory.limit_in_bytes", "1000\n")
    groups.write("memory/memory.usage_in_bytes", "100\n")
    place = groups.join("4:memory:/docker/12\n2:cpu,cpuacct:/docker/12\n")
    assert cpu_quota(*place) == 0.5 and memory_left(*place) == 900


def test_this_process_can_be_read() -> None:
    quota, left = machine_limits.cpu_quota(), machine_limits.memory_left()
    assert (quota is None or quota > 0) and (left is None or left >= 0)
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0)) and available_memory() > 0


@pytest.mark.parametrize(
    ("cores", "quota", "usable"),
    [(16, None, 16), (16, 2.0, 2), (16, 0.25, 1), (16, 2.9, 2), (4, 8.0, 4)],
)
def test_a_quota_gives_whole_cores(cores: int, quota: float | None, usable: int) -> None:
    assert cores_within(cores, quota) == usable


# ---- what follows --------------------------------------------------------------------------------


def test_a_quota_of_two_on_sixteen_cores_starts_two_threads(container: FakeGroups) -> None:
    assert usable_cores() == 2
    assert threads_of(EngineConfig()) == 2
    assert threads_of(EngineConfig(n_threads=7)) == 7
    for numa in (False, True):
        parallel = ParallelConfig(tensor_parallel_size=2, numa=numa)
        assert threads_of(EngineConfig(parallel=parallel)) == 1
    assert ServerConfig(data_parallel_size=2).engine_of_replica.n_threads == 1
    container.write("cpu.max", "max 100000\n")
    assert threads_of(EngineConfig()) == 16
    assert ServerConfig(data_parallel_size=2).engine_of_replica.n_threads == 8


def test_the_memory_limit_bounds_the_automatic_kv_cache(container: FakeGroups) -> None:
    assert available_memory() == 2 * GIB - GIB // 2
    # The fake adapter takes 64 bytes a token and no weights.
    container.write("memory.max", f"{GIB // 2 + 1_000_000}\n")
    engine = LLMEngine(make_config(cache=CacheConfig(block_size=16)))
    assert engine.model_info.num_blocks == int(1_000_000 * 0.4) // (16 * 64)
    engine.close()


def test_the_memory_limit_bounds_the_budget_of_several_models(container: FakeGroups) -> None:
    assert memory_budget(ModelLimits()) == int(0.8 * (2 * GIB - GIB // 2))
    assert memory_budget(ModelLimits(memory_budget=7 * GIB)) == 7 * GIB


def test_the_automatic_kv_cache_leaves_room_for_the_model(
    container: FakeGroups, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    container.write("memory.max", f"{GIB // 2 + 1_000_000}\n")
    weights = 900_000
    monkeypatch.setattr(
        FakeAdapter, "memory_needs", lambda *_: MemoryNeeds(weights, activations=0, logits=0)
    )
    engine = LLMEngine(make_config(cache=CacheConfig(block_size=16)))
    assert engine.model_info.num_blocks == int(100_000 * 0.8) // (16 * 64)
    engine.close()
    assert "needs about" not in caplog.text
    weights = 2_000_000
    engine = LLMEngine(make_config(cache=CacheConfig(block_size=16)))
    assert engine.model_info.num_blocks == 1 and "needs about 0.0 GiB" in caplog.text
    engine.close()


def test_the_environment_report_names_the_limits(container: FakeGroups) -> None:
    assert describe_cores() == "2 of 16 (CPU quota of the control group: 2)"
    assert describe_memory().startswith("1.5 GiB available of ")
    assert describe_memory().endswith("(memory limit of the control group)")
    container.write("cpu.max", "max 100000\n")
    assert describe_cores() == "16"
