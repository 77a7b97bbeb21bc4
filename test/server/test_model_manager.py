"""Loading and unloading of several models, with fake engines and a fake clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from error_helpers import invalid_input, naming

from llaisys.common.types import ModelInfo
from llaisys.server.config import ModelLimits, ServerConfig
from llaisys.server.engine_client.messages import EngineStats, MemoryEstimate
from llaisys.server.errors import ApiError
from llaisys.server.generation.service import Service, SharedState
from llaisys.server.models.manager import ModelManager, public_reason
from llaisys.server.models.served import State
from llaisys.server.sessions.store import SessionStore
from llaisys.server.thread_pool import current_owner

MIB = 1 << 20
SIZE = 400 * MIB
BUDGET = 900 * MIB  # holds two


class FakeEngine:
    """A fake engine: estimates SIZE bytes and loads when allowed, unless `fault` is set."""

    living = 0
    most = 0
    load_seconds = 0.0

    def __init__(self, fault: str | None = None, size: int = SIZE) -> None:
        self.fault = fault
        self.memory_estimate: MemoryEstimate | None = None
        self.size = size
        self.estimated, self.ready = asyncio.Event(), asyncio.Event()
        self.dead: str | None = None
        self.on_death: list[Callable[[str], None]] = []
        self.stats, self.usage, self.loading = EngineStats(num_steps=1), (1.0, 300 * MIB), None
        self.model_info: Any = ModelInfo("p", "fake", 10, 64, (), 1, 16)
        self.inputs = SimpleNamespace(defaults={"temperature": 0.5})
        self.closed = False

    async def start(self) -> None:
        FakeEngine.living += 1
        if self.fault is not None:
            self.dead = self.fault
        else:
            self.memory_estimate = MemoryEstimate(self.size, 0, 0)
        self.estimated.set()

    @property
    def is_ready(self) -> bool:
        return self.ready.is_set() and self.dead is None

    def load(self) -> None:
        FakeEngine.most = max(FakeEngine.most, FakeEngine.living)
        asyncio.get_running_loop().call_later(self.load_seconds, self.ready.set)

    def die(self) -> None:
        self.dead = "killed"
        for callback in self.on_death:
            callback("killed")

    async def close(self) -> None:
        assert not self.closed
        self.closed = True
        FakeEngine.living -= 1
        await asyncio.sleep(0)


class Scene:
    """A manager of three models, a, b and c."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.now = 1000.0
        self.clock: Callable[[], float] = lambda: self.now
        self.engines: dict[str, list[FakeEngine]] = {"a": [], "b": [], "c": []}
        self.faults: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        FakeEngine.living = FakeEngine.most = 0
        shared = SharedState(ServerConfig(), SessionStore(":memory:"))
        services = []
        for name in self.engines:
            service = Service(shared, ServerConfig(served_model_names=(name,)))
            services.append(service)
        settings: dict[str, Any] = {"budget": BUDGET, "keep_alive": 60.0, "load_timeout": 30.0}
        self.manager = ModelManager(
            services, **{**settings, **options}, make=self.make, clock=lambda: self.clock()
        )

    def make(self, service: Service) -> Any:
        name = service.metric_name
        size = self.sizes.get(name, SIZE)
        self.engines[name].append(FakeEngine(self.faults.get(name), size))
        return self.engines[name][-1]

    def state(self, name: str) -> State:
        return self.manager.find(name).state

    async def ask(self, name: str, seconds: float = 0.0) -> None:
        """A request of `seconds`; the model must stay loaded."""
        service, release = await self.manager.lease(name)
        engine: Any = service.engine
        await asyncio.sleep(seconds)
        assert service.engine_or_none is engine and not engine.closed
        release()


class SimulatedTime(asyncio.SelectorEventLoop):
    """Time advances to the next timer when all tasks wait, or when the loop would run that timer
    early, within its clock's resolution; threads do their work at once."""

    _now = 0.0
    _clock_resolution: float
    _ready: Sequence[asyncio.Handle]
    _scheduled: Sequence[asyncio.TimerHandle]

    def time(self) -> float:
        return self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        if self._scheduled:
            next_timer = self._scheduled[0].when()
            if not self._ready or next_timer < self._now + self._clock_resolution:
                self._now = max(self._now, next_timer)
        super()._run_once()  # type: ignore[misc]


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        runner.run(asyncio.wait_for(work, 20))


def test_loads_on_demand_and_unloads_least_recently_used(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        scene = Scene(tmp_path)
        for name in ("a", "b", "a"):
            scene.now += 1
            await scene.ask(name)
        assert [len(engines) for engines in scene.engines.values()] == [1, 1, 0]
        await scene.ask("c")  # b is the least recently used
        assert scene.state("b") is State.UNLOADED
        assert scene.state("a") is scene.state("c") is State.READY
        assert scene.manager.reserved == 2 * SIZE
        await scene.manager.close()
        assert FakeEngine.living == 0

    run(work())


def test_random_requests_are_answered_within_the_budget(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        scene = Scene(tmp_path)
        scene.clock = asyncio.get_running_loop().time
        asks = [scene.ask("abc"[i * 7 % 3], 0.01 * (i % 4)) for i in range(60)]
        await asyncio.gather(*asks)
        assert FakeEngine.most <= 3  # two loaded, one estimating
        assert scene.manager.reserved <= BUDGET
        loads = sum(len(engines) for engines in scene.engines.values())
        assert loads <= 9  # batched: fewer loads than requests
        await scene.manager.close()

    run(work())


def test_one_load_serves_all_waiting_requests(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path)
        await asyncio.gather(*[scene.ask("b") for _ in range(50)])
        assert len(scene.engines["b"]) == 1
        await scene.manager.close()

    run(work())


def test_unload_never_ends_a_running_request(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path)
        (_, free_a), (_, free_b) = [await scene.manager.lease(name) for name in "ab"]
        waiting = asyncio.create_task(scene.ask("c"))
        await asyncio.sleep(0.02)
        assert not waiting.done() and scene.state("a") is State.READY  # too early
        scene.now += 100
        free_b()
        free_b()  # idempotent
        await waiting
        assert scene.state("b") is State.UNLOADED and scene.state("a") is State.READY
        free_a()
        await scene.manager.close()

    run(work())


def test_busy_model_is_drained_after_its_residency(tmp_path: Path) -> None:
    """Its requests finish; new ones wait until it is loaded again."""

    async def work() -> None:
        scene = Scene(tmp_path, budget=SIZE)
        _, free_a = await scene.manager.lease("a")
        scene.now += 100  # longer than its minimum residency
        second = asyncio.create_task(scene.ask("b"))
        await asyncio.sleep(0.02)
        assert scene.state("a") is State.UNLOADING
        third = asyncio.create_task(scene.ask("a"))
        await asyncio.sleep(0.02)
        assert not second.done() and not third.done()
        free_a()
        await asyncio.gather(second, third)
        assert [len(engines) for engines in scene.engines.values()] == [2, 1, 0]
        await scene.manager.close()

    run(work())


def test_every_model_is_checked_at_start(tmp_path: Path) -> None:
    async def work() -> None:
        checked = []

        async def check(service: Service) -> str | None:
            checked.append(service.metric_name)
            return "/models/b/config.json: broken" if service.metric_name == "b" else None

        scene = Scene(tmp_path, check=check)
        await scene.manager.start()
        while scene.state("b") is not State.FAILED or len(checked) < 2:
            await asyncio.sleep(0.01)
        assert checked == ["b", "c"] and scene.state("a") is State.READY
        assert scene.state("c") is State.UNLOADED
        assert scene.manager.card("b")["error"] == "config.json: broken"
        assert "error" not in scene.manager.card("c")
        with naming(ApiError, "config.json: broken"):
            await scene.ask("b")
        scene.now += 2
        await scene.ask("b")  # it has been repaired
        assert "error" not in scene.manager.card("b")
        await scene.manager.close()

    run(work())


@pytest.mark.parametrize(
    "reason, public",
    [
        ("the engine failed: ModelLoadError: /a/b/config.json: bad", "config.json: bad"),
        ("model: '/srv/secret/m.gguf' does not exist", "model: 'm.gguf' does not exist"),
        ("x: unknown architecture 'y'; known: a, b; to add one: docs/internals/z.md",
         "x: unknown architecture 'y'; to add one: docs/internals/z.md"),
        ("use `llaisys chat org/name --lora ~/secret/x`", "use `llaisys chat org/name --lora x`"),
        ("it needs 5 bytes; the budget is 4", "it needs 5 bytes; the budget is 4"),
        ("../secret/x is 1/2 of y", "x is 1/2 of y"),
    ],
)  # fmt: skip
def test_clients_see_the_reason_without_directories(reason: str, public: str) -> None:
    assert public_reason(reason) == public


def test_failed_load_is_a_503_for_that_model_only(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path)
        scene.faults["b"] = "there is no such file /secret/path"
        with pytest.raises(ApiError) as caught:
            await scene.ask("b")
        error = caught.value
        assert (error.status, error.code, error.retry_after) == (503, "model_unavailable", 1)
        assert "secret" not in error.message
        await asyncio.gather(scene.ask("a"), scene.ask("c"))
        with pytest.raises(ApiError):
            await scene.ask("b")  # no retry during the pause
        assert len(scene.engines["b"]) == 1
        scene.now += 1
        with pytest.raises(ApiError) as caught:
            await scene.ask("b")
        assert caught.value.retry_after == 2 and len(scene.engines["b"]) == 2
        scene.now += 2
        del scene.faults["b"]
        await scene.ask("b")  # loaded again
        assert scene.manager.reserved <= BUDGET
        await scene.manager.close()
        assert FakeEngine.living == 0

    run(work())


def test_model_over_the_budget_unloads_no_other(tmp_path: Path) -> None:
    """It is rejected at once with the numbers. After a pause it is estimated again, if a bare
    engine fits, and loaded once its estimate fits."""

    async def work() -> None:
        scene = Scene(tmp_path, load_timeout=1e6)
        scene.sizes["c"] = BUDGET + 1
        await scene.ask("a")
        for pause, asked in ((0, 1), (0, 1), (100, 2)):
            scene.now += pause
            with pytest.raises(ApiError) as caught:
                await scene.ask("c")
            assert caught.value.code == "model_unavailable"
            numbers = f"it needs {BUDGET + 1} bytes; the budget is {BUDGET}"
            assert numbers in caught.value.message
            assert scene.manager.find("c").problem == numbers
            assert scene.state("a") is State.READY and len(scene.engines["c"]) == asked
        await scene.ask("b")
        scene.now += 100
        with pytest.raises(ApiError):
            await scene.ask("c")
        assert len(scene.engines["c"]) == 2 and scene.state("b") is State.READY
        scene.sizes["c"] = SIZE  # the files changed
        await scene.manager.unload_idle_once()
        scene.now += 100
        await scene.ask("c")
        assert scene.state("c") is State.READY
        await scene.manager.close()

    run(work())


def test_budget_below_a_bare_engine_is_rejected_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, budget=100 * MIB, load_timeout=1e6)
        with pytest.raises(ApiError, match=f"it needs {128 * MIB} bytes; the budget is"):
            await scene.ask("a")
        assert scene.engines["a"] == []
        await scene.manager.close()

    run(work())
    with invalid_input("memory_budget"):
        ModelLimits(memory_budget=100 * MIB)


def test_dead_engine_is_reloaded_and_its_memory_released(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path)
        await scene.ask("a")
        scene.engines["a"][0].die()
        assert scene.state("a") is State.FAILED
        await asyncio.gather(scene.ask("b"), scene.ask("c"))
        assert scene.manager.reserved == 2 * SIZE
        scene.now += 1
        await scene.ask("a")
        assert len(scene.engines["a"]) == 2
        await scene.manager.close()
        assert FakeEngine.living == 0

    run(work())


def test_retry_pause_grows_until_a_request_succeeds(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path)

        async def pause_after_death() -> int | None:
            scene.engines["a"][-1].die()
            with pytest.raises(ApiError) as caught:
                await scene.ask("a")
            scene.now += 60
            return caught.value.retry_after

        for _ in range(3):  # killed after successful requests: the pause stays short
            await scene.ask("a")
            assert await pause_after_death() == 1
        pauses = []
        for _ in range(3):  # dies during the first request
            _, release = await scene.manager.lease("a")
            pauses.append(await pause_after_death())
            release()
        assert pauses == [2, 4, 8]
        await scene.manager.close()

    run(work())


def test_waiting_requests_time_out(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, load_timeout=0.05, max_waiting=2)
        leases = [await scene.manager.lease(name) for name in "ab"]
        results = await asyncio.gather(*[scene.ask("c") for _ in range(3)], return_exceptions=True)
        codes = sorted(error.code or "" for error in results if isinstance(error, ApiError))
        assert codes == ["model_load_timeout", "model_load_timeout", "models_busy"]
        for _, release in leases:
            release()
        await scene.ask("c")
        await scene.manager.close()

    run(work())


def test_drain_times_out(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, load_timeout=0.1, budget=SIZE)
        _, release = await scene.manager.lease("a")
        scene.now += 100
        with pytest.raises(ApiError):
            await scene.ask("b")
        await asyncio.sleep(0.1)
        assert scene.state("a") is State.READY  # unchanged
        await scene.ask("a")
        release()
        await scene.manager.close()

    run(work())


def test_idle_models_are_unloaded(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, keep_alive=60.0)
        await scene.ask("a")
        _, release = await scene.manager.lease("b")
        scene.now += 61
        await scene.manager.unload_idle_once()
        assert scene.state("a") is State.UNLOADED and scene.state("b") is State.READY
        release()
        scene.now += 60
        await scene.manager.unload_idle_once()
        assert scene.state("b") is State.READY  # since its release
        scene.now += 1
        await scene.manager.unload_idle_once()
        assert scene.state("b") is State.UNLOADED and scene.manager.reserved == 0
        await scene.manager.close()

    run(work())


def test_unknown_model_is_a_404(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    with pytest.raises(ApiError) as caught:
        run(scene.ask("d"))
    assert caught.value.status == 404 and "a, b, c" in caught.value.message


def test_long_request_delays_others_by_at_most_half_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client streams from a without end and requests b; the budget holds one model."""
    monkeypatch.setattr("llaisys.server.models.manager.MIN_RESIDENCY", 0.0)

    async def work() -> None:
        scene = Scene(tmp_path, budget=SIZE)
        loop = asyncio.get_running_loop()
        scene.clock = loop.time
        _, release = await scene.manager.lease("a")
        scene.manager.find("a").drain_window = 0.05
        other = asyncio.create_task(scene.ask("b"))
        start, waited, longest = loop.time(), 0.0, 0.0
        while loop.time() - start < 1.4:  # drains of 0.05, 0.1, 0.2 and 0.4 s
            began = loop.time()
            await scene.ask("a")
            waited += loop.time() - began
            longest = max(longest, loop.time() - began)
            await asyncio.sleep(0.005)
        elapsed = loop.time() - start
        assert 0.1 < waited < 0.65 * elapsed and longest < 0.6
        assert not other.done() and scene.manager.find("a").drain_window > 0.3
        release()
        await other
        assert scene.state("a") is State.UNLOADED and scene.state("b") is State.READY
        await scene.manager.close()

    run(work())


def test_quiet_key_waits_for_one_load_of_each_other_model_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key keeps requesting a and b; the budget holds one model. The other key's requests for c
    wait for at most one load of a and one of b."""
    monkeypatch.setattr("llaisys.server.models.manager.MIN_RESIDENCY", 0.02)
    monkeypatch.setattr(FakeEngine, "load_seconds", 0.005)

    async def work() -> None:
        scene = Scene(tmp_path, budget=SIZE)
        scene.clock = asyncio.get_running_loop().time
        answers = [0, 0]

        async def flood(number: int) -> None:
            current_owner.set("flood")
            while True:
                await scene.ask("ab"[number % 2], 0.01)
                answers[number % 2] += 1

        floods = [asyncio.create_task(flood(number)) for number in range(8)]
        current_owner.set("quiet")
        waited = []
        for _ in range(5):
            await asyncio.sleep(0.05)
            before = len(scene.engines["a"]) + len(scene.engines["b"])
            await scene.ask("c")
            waited.append(len(scene.engines["a"]) + len(scene.engines["b"]) - before)
        assert max(waited) <= 2, waited
        assert min(answers) > 5  # the flood is served too
        for task in floods:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
        await scene.manager.close()

    run(work())


def test_one_key_cannot_fill_the_queue_for_models(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, load_timeout=0.2, max_waiting=4)
        leases = [await scene.manager.lease(name) for name in "ab"]

        async def wait_for(owner: str) -> str:
            current_owner.set(owner)  # of this task only
            with pytest.raises(ApiError) as caught:
                await scene.ask("c")
            return caught.value.code or ""

        codes = await asyncio.gather(*[wait_for("flood") for _ in range(4)], wait_for("quiet"))
        assert codes[:2] == ["model_load_timeout"] * 2 and codes[2:4] == ["models_busy"] * 2
        assert codes[4] == "model_load_timeout"
        for _, release in leases:
            release()
        await scene.manager.close()

    run(work())
