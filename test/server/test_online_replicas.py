"""`serve --data-parallel-size`: several engines behind one server, and engine deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from error_helpers import invalid_input
from http_helpers import reply
from replica_helpers import COMPLETIONS, ask, ask_all, metric, pids, wait_up
from server_helpers import Gate, ServerProcess, alive
from wire_helpers import sse_events

from llaisys.common.errors import InvalidInputError
from llaisys.common.numa import cores_of_rank, numa_nodes
from llaisys.engine.config import EngineConfig
from llaisys.server.config import ServerConfig
from llaisys.server.model_entries import ModelEntry

STEP = {"LLAISYS_TEST_STEP_SECONDS": "0.02"}
TWO = ("--data-parallel-size", "2")


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*TWO, "--numa", env=STEP) as process:
        process.wait_ready()
        wait_up(process)
        yield process


def test_requests_are_distributed_and_results_are_equal(server: ServerProcess) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = ask_all(pool, server, 8, 30)
        server.wait_for(
            lambda: min(metric(server, "replica_requests_running").values()) > 0,
            "both replicas to run something",
        )
        for prompt, answer in answers.items():
            assert answer.result() == reply(prompt, 30)
    server.wait_idle()
    assert metric(server, "replica_up") == {0: 1.0, 1: 1.0}
    for index, pid in pids(server).items():  # --numa
        assert os.sched_getaffinity(pid) == cores_of_rank(numa_nodes(), index, 2)


def test_the_choice_of_the_device_is_one_line_for_all_replicas() -> None:
    hidden = {"LLAISYS_DEVICE": "", "CUDA_VISIBLE_DEVICES": ""}  # auto, without a GPU
    with ServerProcess(*TWO, env=hidden) as server:
        server.wait_ready()
        wait_up(server)
        messages = [str(event.get("message")) for event in server.events()]
        chosen = [text for text in messages if text.startswith("device ")]
        assert len(chosen) == 1 and chosen[0].startswith("device cpu: ")


def test_cuda_without_a_gpu_ends_the_server_with_what_is_missing() -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    with ServerProcess("--device", "cuda", env=hidden) as server:
        reason = "device is 'cuda'; it must be cpu here: "
        server.wait_for(lambda: any(reason in line for line in server.log), "the reason")
        assert server.process.wait(60) != 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_replica_fails_only_its_requests_and_restarts(how: int) -> None:
    with ServerProcess(*TWO, "--engine-dead-after", "1", env=STEP) as server:
        server.wait_ready()
        wait_up(server)
        with ThreadPoolExecutor(8) as pool:
            answers = ask_all(pool, server, 8, 150)
            server.wait_for(
                lambda: min(metric(server, "replica_requests_running").values()) > 1,
                "both replicas to run something",
            )
            victim = pids(server)[0]
            os.kill(victim, how)
            with server.client() as client:
                server.wait_for(
                    lambda: client.get("/health").json().get("status") == "degraded", "degraded"
                )
                assert client.get("/health").json()["replicas_down"] == [0]
                during = ask(server, "asked meanwhile", 5)
            results = {prompt: answer.result() for prompt, answer in answers.items()}
        assert during == reply("asked meanwhile", 5)
        right = [p for p, tokens in results.items() if tokens == reply(p, 150)]
        wrong = [str(answer) for p, answer in results.items() if p not in right]
        assert right and wrong
        assert set(wrong) == {"the engine failed on this request"}  # the reason is in the log
        assert any("replica down" in line for line in server.log)
        wait_up(server)
        assert metric(server, "replica_restarts_total") == {0: 1.0, 1: 0.0}
        assert not alive(victim)
        assert pids(server)[0] != victim
        with ThreadPoolExecutor(8) as pool:
            for prompt, answer in ask_all(pool, server, 8, 10).items():
                assert answer.result() == reply(prompt, 10)
        server.wait_idle()


def test_requests_without_tokens_move_to_another_replica(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with ServerProcess(*TWO, env=gate.env) as server, ThreadPoolExecutor(6) as pool:
        server.wait_ready()
        wait_up(server)
        gate.order("wait")
        answers = ask_all(pool, server, 6, 5)
        gate.hold()
        server.wait_for(lambda: server.load == 6, "admission")
        os.kill(pids(server)[1], signal.SIGKILL)
        server.wait_for(lambda: metric(server, "replica_up")[1] == 0.0, "the death to be noticed")
        gate.open()
        for prompt, answer in answers.items():
            assert answer.result() == reply(prompt, 5)


def test_503_while_no_replica_is_up(server: ServerProcess) -> None:
    for pid in pids(server).values():
        os.kill(pid, signal.SIGKILL)
    with server.client() as client:
        server.wait_for(lambda: client.get("/health").status_code == 503, "nothing to work")
        refused = client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
        assert refused.status_code == 503, refused.text
    wait_up(server)
    assert ask(server, "again", 4) == reply("again", 4)


def test_cancelled_request_releases_its_route(server: ServerProcess) -> None:
    with server.client() as client:
        body = {"prompt": "long", "max_tokens": 500, "stream": True, "ignore_eos": True}
        headers = {"X-Request-Id": "the-long-one"}
        with client.stream("POST", COMPLETIONS, json=body, headers=headers) as response:
            events = sse_events(response)
            next(events)
            with server.client() as other:
                assert other.post("/v1/requests/the-long-one/cancel").json()["cancelled"] is True
    server.wait_idle()


def test_unloadable_model_ends_the_server() -> None:
    with ServerProcess("/no/such/model", *TWO, real=True) as server:
        assert server.process.wait(60) == 1
        assert any("no/such/model" in line for line in server.log)


def test_stopped_server_ends_all_replicas(server: ServerProcess) -> None:
    children = pids(server)
    assert server.stop() == 0
    assert not any(alive(pid) for pid in children.values())


def test_data_parallel_size_is_validated() -> None:
    with ServerProcess("--data-parallel-size", "0") as server:
        assert server.process.wait(30) == 1
        assert any("data_parallel_size is 0" in line for line in server.log)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "n_threads is 0"),
        ({"models": (ModelEntry(("a",), EngineConfig.of(model="mock")),)}, "several models"),
    ],
)
def test_ray_replicas_require_threads(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ServerConfig(data_parallel_backend="ray", **options)
    with invalid_input("data_parallel_backend"):
        ServerConfig(data_parallel_backend="k8s")
