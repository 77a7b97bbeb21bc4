"""The queue of grammar compilations: fair between owners, within limits, with queue timeouts."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from scheduler_helpers import make_scheduler

from llaisys.common.request import Request
from llaisys.common.sampling import SamplingParams
from llaisys.common.structured import StructuredOutputs
from llaisys.common.types import ModelInfo
from llaisys.engine.admission import Admission
from llaisys.engine.structured import service as service_module
from llaisys.engine.structured.requests import StructuredRequests
from llaisys.engine.structured.service import MAX_PROCESSES, Grammar, GrammarService

INFO = ModelInfo("p", "mock", 10, 64, (), 1, 16)
CPU_SECONDS = 2.0  # of every compilation here


class Processes:
    """Compilations without processes: started grammars in order."""

    def __init__(self) -> None:
        self.started: list[Grammar] = []
        self.done: set[str] = set()

    def finish(self, *names: str) -> None:
        self.done |= set(names)


def spec(name: str) -> StructuredOutputs:
    return StructuredOutputs(choice=[name])


def name_of(grammar: Grammar) -> str:
    assert grammar.spec.choice is not None
    return str(grammar.spec.choice[0])


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    found = Processes()

    def start(grammar: Grammar, *_: object) -> None:
        grammar.sent_at = time.monotonic()
        found.started.append(grammar)

    def check(grammar: Grammar) -> None:
        if name_of(grammar) in found.done:
            grammar.is_ready, grammar.compile_seconds = True, CPU_SECONDS

    monkeypatch.setattr(Grammar, "start", start)
    monkeypatch.setattr(Grammar, "check_compiled", check)
    monkeypatch.setattr(Grammar, "is_started", property(lambda self: self in found.started))
    monkeypatch.setattr(GrammarService, "_start_process", lambda self: None)
    yield found


def open_service() -> GrammarService:
    service = GrammarService(INFO, 4)
    service._control = object()  # type: ignore[assignment]
    service._is_open = True
    return service


def test_one_owner_uses_all_compilers(processes: Processes) -> None:
    service = open_service()
    for number in range(4):
        service.get(spec(f"a{number}"), "a")
    service.poll()
    assert [name_of(g) for g in processes.started] == ["a0", "a1"]


def test_quiet_owner_does_not_wait_for_a_flood(processes: Processes) -> None:
    service = open_service()
    service.get(spec("q"), "quiet")
    service.poll()
    processes.finish("q")
    service.poll()
    for number in range(60):
        service.get(spec(f"a{number}"), "a")
    service.poll()
    assert [name_of(g) for g in processes.started] == ["q", "a0"]  # one compiler is left
    service.get(spec("b"), "b")
    service.poll()
    assert name_of(processes.started[-1]) == "b"


def test_a_long_queue_costs_one_check_per_owner_and_step(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []

    def refuse(self: GrammarService, owner: str) -> bool:
        checked.append(owner)
        return False

    monkeypatch.setattr(GrammarService, "_may_start", refuse)
    service = open_service()
    for number in range(600):
        service.get(spec(f"a{number}"), "ab"[number % 2])
    service.poll()
    assert checked == ["a", "b"]


def test_owners_alternate(processes: Processes) -> None:
    service = open_service()
    for owner in "abc":
        for number in range(3):
            service.get(spec(f"{owner}{number}"), owner)
    order: list[str] = []
    while len(order) < 9:
        service.poll()
        order = [name_of(g) for g in processes.started]
        processes.finish(*order)
    assert [sorted(name[0] for name in order[i : i + 3]) for i in (0, 3, 6)] == [list("abc")] * 3


def test_a_grammar_is_shared_within_an_owner_only(processes: Processes) -> None:
    """Otherwise the time until the first token tells whether another key uses a schema."""
    service = open_service()
    first = service.get(spec("x"), "a")
    service.poll()
    processes.finish("x")
    service.poll()
    assert first.is_ready
    assert service.get(spec("x"), "a") is first
    other = service.get(spec("x"), "b")
    assert other is not first and not other.is_ready
    service.release(other)
    assert service.get(spec("x"), "a") is first


def test_compile_budget_delays_an_owner(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "COMPILE_BUDGET", 3 * CPU_SECONDS)
    service = open_service()
    service.get(spec("b"), "b")
    for number in range(8):
        service.get(spec(f"a{number}"), "a")
    for _ in range(20):
        service.poll()
        processes.finish(*[name_of(g) for g in processes.started])
    assert sum(g.owner == "a" for g in processes.started) == 3
    monkeypatch.setattr(service_module, "BUDGET_WINDOW", 0.0)
    service.poll()
    assert sum(g.owner == "a" for g in processes.started) == 4


def test_processes_are_limited_in_total_and_per_owner(processes: Processes) -> None:
    service = open_service()
    users = []
    for number in range(MAX_PROCESSES):
        users.append(service.get(spec(f"a{number}"), "a"))
        users.append(service.get(spec(f"b{number}"), "b"))

    def run() -> list[str]:
        for _ in range(4 * MAX_PROCESSES):
            service._budgets.update({owner: service_module.CompileBudget() for owner in "ab"})
            service.poll()
            processes.finish(*[name_of(g) for g in processes.started])
        return [g.owner for g in processes.started]

    owners = run()
    assert owners.count("a") == owners.count("b") == MAX_PROCESSES // 2
    service.release(processes.started[0])  # idle: evicted for the next one
    assert len(run()) == MAX_PROCESSES + 1


def test_pending_requests_expire_and_free_their_compiler(processes: Processes) -> None:
    requests = StructuredRequests(INFO, 4)
    requests._service = open_service()
    admission = Admission(make_scheduler(), [requests], requests.start)
    now = time.monotonic()
    for number, deadline in enumerate((now - 1, now + 50, None)):
        params = SamplingParams(structured_outputs=spec(f"a{number}"))
        admission.add([Request(f"r{number}", [1], params, owner="a")], deadline)
    admission.poll()
    assert len(processes.started) == 2
    assert [[r.request_id for r in prompt] for prompt in admission.expire()] == [["r0"]]
    assert len(list(admission.pending(requests))) == 2 and not admission.expire()
    admission.poll()
    assert [name_of(g) for g in processes.started] == ["a0", "a1", "a2"]
