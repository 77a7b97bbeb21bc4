"""Names, loads, unloads and host memory of adapters, with fake workers."""

from __future__ import annotations

import time

import pytest
from error_helpers import naming
from scheduler_helpers import make_scheduler

from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.common.lora import LoraState
from llaisys.common.request import Request
from llaisys.common.sampling import SamplingParams
from llaisys.engine.admission import Admission
from llaisys.engine.config import LoraConfig
from llaisys.engine.lora_registry import LoraRegistry


class Workers:
    """Adapters in host memory; reads end with `finish`."""

    def __init__(self, ready: int = 0) -> None:
        self.states = dict.fromkeys(range(1, ready + 1), LoraState.READY)
        self.errors: dict[int, str] = {}
        self.dropped: list[int] = []

    def __call__(self, method: str, lora_id: int, *args: object) -> list[object]:
        return [getattr(self, method)(lora_id, *args)]

    def open(self, lora_id: int, path: str, read: bool) -> None:
        self.states[lora_id] = LoraState.READING

    def read(self, lora_id: int) -> None:
        assert self.states[lora_id] in (LoraState.ON_DISK, LoraState.FAILED)
        self.states[lora_id] = LoraState.READING

    def evict(self, lora_id: int) -> None:
        assert self.states[lora_id] is LoraState.READY
        self.states[lora_id] = LoraState.ON_DISK

    def drop(self, lora_id: int) -> None:
        del self.states[lora_id]
        self.dropped.append(lora_id)

    def state(self, lora_id: int) -> LoraState:
        return self.states[lora_id]

    def error(self, lora_id: int) -> str:
        return self.errors[lora_id]

    def finish(self, state: LoraState = LoraState.READY) -> None:
        for lora_id, found in self.states.items():
            if found is LoraState.READING:
                self.states[lora_id] = state
                if state is LoraState.FAILED:
                    self.errors[lora_id] = "broken"


class Fixture:
    def __init__(self, modules: int = 0, **options: int) -> None:
        config = LoraConfig(
            enable_lora=True, lora_modules={f"m{i}": f"p{i}" for i in range(modules)}, **options
        )
        self.workers = Workers(min(modules, config.num_host))
        for lora_id in range(config.num_host + 1, modules + 1):
            self.workers.states[lora_id] = LoraState.ON_DISK
        self.used: set[int] = set()
        self.freed: list[int] = []
        self.registry = LoraRegistry(config, self.workers, lambda: self.used, self.freed.append)

    def load(self, name: str, *, in_place: bool = False) -> int:
        lora_id = self.registry.load(name, "path", in_place)
        assert self.registry.finished_loads() == []
        self.workers.finish()
        (result,) = self.registry.finished_loads()
        assert (result.lora_id, result.error) == (lora_id, None)
        return lora_id


def request(name: str) -> Request:
    return Request(f"r-{name}", [1, 2, 3], SamplingParams(), lora=name)


def test_modules_have_ids_in_their_order() -> None:
    found = Fixture(3)
    first = request("m1")
    assert found.registry.begin([first]) is None and first.lora_id == 2


def test_unknown_names_and_disabled_adapters_are_refused() -> None:
    found = Fixture(1)
    with pytest.raises(InvalidInputError):
        found.registry.assign([request("other")])
    with pytest.raises(InvalidInputError):
        found.registry.load("m0", "path")
    with pytest.raises(InvalidInputError):
        found.registry.load("a b", "path")
    off = LoraRegistry(LoraConfig(), Workers(), set, lambda _: None)
    with pytest.raises(InvalidInputError):
        off.load("a", "path")


def test_a_reloaded_adapter_has_another_id() -> None:
    found = Fixture(max_loras=2)
    first = found.load("a")
    found.registry.unload("a")
    second = found.load("a")
    assert second != first and found.workers.dropped == [first] == found.freed
    third = found.load("a", in_place=True)
    found.registry.drop_retired()
    assert third != second and found.workers.dropped == [first, second]
    assert found.registry.names == ("a",)


def test_an_unloaded_adapter_stays_until_its_requests_end() -> None:
    found = Fixture(1)
    found.used = {1}
    found.registry.unload("m0")
    assert found.registry.names == () and found.workers.dropped == []
    with pytest.raises(InvalidInputError):
        found.registry.assign([request("m0")])
    found.used = set()
    found.registry.drop_retired()
    assert found.workers.dropped == [1]


def test_a_failed_load_leaves_nothing() -> None:
    found = Fixture(max_loras=1)
    lora_id = found.registry.load("a", "path")
    found.workers.finish(LoraState.FAILED)
    (result,) = found.registry.finished_loads()
    assert isinstance(result.error, ModelLoadError) and "broken" in str(result.error)
    assert found.registry.names == () and found.workers.dropped == [lora_id]
    assert found.registry.num_host == 0 and found.registry.num_failures == 1
    found.load("a")


def test_requests_wait_until_their_adapter_is_read_again() -> None:
    found = Fixture(3, max_loras=1, max_cpu_loras=2)
    adapter = found.registry.begin([request("m2")])
    assert adapter is not None
    assert found.workers.states[1] is LoraState.ON_DISK  # the least recently used one
    assert not found.registry.is_ready(adapter)
    found.workers.finish()
    assert found.registry.is_ready(adapter)


def test_used_adapters_are_not_evicted() -> None:
    found = Fixture(3, max_loras=1, max_cpu_loras=2)
    found.used = {1, 2}
    adapter = found.registry.begin([request("m2")])
    assert adapter is not None
    assert not found.registry.is_ready(adapter) and found.workers.states[3] is LoraState.ON_DISK
    found.used = {2}
    assert not found.registry.is_ready(adapter)
    assert found.workers.states[1] is LoraState.ON_DISK
    assert found.workers.states[3] is LoraState.READING


def test_a_file_that_cannot_be_read_again_fails_its_requests_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = Fixture(2, max_loras=1, max_cpu_loras=1)
    for number in range(1, 3):  # the next request tries again
        adapter = found.registry.begin([request("m1")])
        assert adapter is not None
        found.workers.finish(LoraState.FAILED)
        for _ in range(2):  # two prompts that waited for one read
            with naming(InvalidInputError, "'m1'"):
                found.registry.is_ready(adapter)
        assert "broken" in caplog.text and found.registry.num_failures == number
        found.registry.poll()
    assert found.registry.names == ("m0", "m1")


def test_pending_requests_are_cancelled_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Fixture(2, max_loras=1, max_cpu_loras=1)
    admission = Admission(make_scheduler(), [found.registry], lambda _: None)
    first, second = request("m1"), request("m1")
    second.request_id = "second"
    admission.add([first, second], time.monotonic() + 50)
    assert list(admission.pending(found.registry)) == [first, second]
    assert admission.cancel("r-m1") and first.finished and not admission.cancel("x")
    assert admission.expire() == []
    late = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: late)
    assert admission.expire() == [[second]] and second.finished and not admission.is_busy


def test_a_request_waits_for_a_load_that_is_repeated() -> None:
    found = Fixture(max_loras=1)
    found.registry.load("a", "path")
    adapter = found.registry.begin([request("a")])
    assert adapter is not None
    found.workers.finish(LoraState.FAILED)
    with pytest.raises(InvalidInputError):
        found.registry.is_ready(adapter)
    found.registry.poll()
    (result,) = found.registry.finished_loads()
    assert result.error is not None and found.registry.names == ()
    assert found.registry.num_failures == 1


def test_host_memory_is_bounded() -> None:
    found = Fixture(max_loras=2, max_cpu_loras=3)
    for number in range(10):
        found.load(f"a{number}")
        assert found.registry.num_host <= 3
    ready = [i for i, state in found.workers.states.items() if state is LoraState.READY]
    assert ready == [8, 9, 10] and len(found.registry.names) == 10
