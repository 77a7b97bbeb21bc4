"""`serve --prefill-replicas`: long prompts are computed by one replica and decoded by another. The
death of either costs only time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from error_helpers import invalid_input
from http_helpers import reply
from replica_helpers import COMPLETIONS, ask, metric, pids, wait_up
from server_helpers import Gate, ServerProcess, open_files, socket_directories

from llaisys.common.errors import InvalidInputError
from llaisys.engine.config import EngineConfig
from llaisys.server.config import ServerConfig

ROLES = ("--data-parallel-size", "2", "--prefill-replicas", "1", "--prefill-threshold", "64")
STEP = {"LLAISYS_TEST_STEP_SECONDS": "0.005"}


def long_prompt(number: int) -> str:
    return f"{number} long prompt " * 20


def num_shared(server: ServerProcess) -> int:
    """Return the number of host memories that the decode replica has open."""
    return sum("llaisys-kv" in name for name in open_files(pids(server)[1]))


def received(server: ServerProcess) -> float:
    return server.metric("kv_transfer_received_blocks_total")


@pytest.fixture(params=["shm", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess(*ROLES, "--kv-transfer", request.param, env=STEP) as process:
        process.wait_ready()
        wait_up(process)
        yield process


def test_answers_are_those_of_one_engine_and_blocks_move(server: ServerProcess) -> None:
    prompts = [long_prompt(number) for number in range(6)] + ["short", "also short"]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, server, prompt, 20) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result() == reply(prompt, 20)
    server.wait_idle()
    moved = received(server)
    assert moved >= 6 * 15  # blocks of 16 tokens
    assert server.metric("kv_transfer_sent_blocks_total") == moved
    assert server.metric("kv_transfer_received_bytes_total") == moved * 16 * 8
    assert server.metric("kv_transfer_seconds_total") > 0
    assert server.metric("kv_transfer_failures_total") == 0
    assert ask(server, prompts[0], 20) == reply(prompts[0], 20)  # the decode replica has it
    assert received(server) == moved


def test_several_choices_and_later_turns(server: ServerProcess) -> None:
    with server.client() as client:
        body = {"prompt": long_prompt(1), "max_tokens": 5, "n": 3, "seed": 3, "ignore_eos": True}
        first = client.post(COMPLETIONS, json=body).json()
        usage = first["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
        again = client.post(COMPLETIONS, json=body).json()
        assert [c["text"] for c in first["choices"]] == [c["text"] for c in again["choices"]]
        longer = long_prompt(1) + long_prompt(2)
        assert ask(server, longer, 8) == reply(longer, 8)
        rejected = client.post(COMPLETIONS, json={**body, "prompt": long_prompt(1) * 20})
        assert rejected.status_code == 400
    server.wait_idle()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_death_of_the_prefill_replica_costs_only_time(tmp_path: Path, how: int) -> None:
    gate, before = Gate(tmp_path), socket_directories()
    options = ("--engine-dead-after", "1", "--max-num-batched-tokens", "256")
    with (
        ServerProcess(*ROLES, *options, env=gate.env) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        server.wait_ready()
        wait_up(server)
        assert ask(server, long_prompt(9), 9) == reply(long_prompt(9), 9)
        mapped, moved = num_shared(server), received(server)
        assert moved > 0
        prompts = [long_prompt(number) for number in range(3)]
        gate.order("prefill 0")
        answers = [pool.submit(ask, server, prompt, 12) for prompt in prompts]
        gate.hold_in_prefill()
        os.kill(pids(server)[0], how)
        server.wait_for(lambda: metric(server, "replica_up")[0] == 0.0, "the death to be noticed")
        gate.open()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result() == reply(prompt, 12)
        assert received(server) == moved
        wait_up(server)
        assert ask(server, long_prompt(7), 9) == reply(long_prompt(7), 9)
        assert received(server) > moved  # the new process is used
        server.wait_idle()
        server.wait_for(lambda: num_shared(server) == mapped, "the dead one's memory to be freed")
        server.stop()
    assert socket_directories() <= before


def test_death_of_the_decode_replica_during_the_prefill(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    options = ("--max-num-batched-tokens", "256")
    with (
        ServerProcess(*ROLES, *options, env=gate.env) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        server.wait_ready()
        wait_up(server)
        prompts = [long_prompt(number) for number in range(3)]
        gate.order("prefill 0")
        answers = [pool.submit(ask, server, prompt, 12) for prompt in prompts]
        gate.hold_in_prefill()
        os.kill(pids(server)[1], signal.SIGKILL)
        server.wait_for(lambda: metric(server, "replica_up")[1] == 0.0, "the death to be noticed")
        gate.open()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result() == reply(prompt, 12)
        wait_up(server)
        server.wait_idle()


def test_a_prefill_is_cancelled_with_its_request(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with (
        ServerProcess(*ROLES, "--max-num-batched-tokens", "256", env=gate.env) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        server.wait_ready()
        wait_up(server)
        gate.order("prefill 0")
        with server.client() as client:
            body = {"prompt": long_prompt(1), "max_tokens": 5}
            headers = {"X-Request-Id": "the-long-one"}
            answer = pool.submit(client.post, COMPLETIONS, json=body, headers=headers)
            gate.hold_in_prefill()
            with server.client() as other:
                reached = other.post("/v1/requests/the-long-one/cancel")
                assert reached.json()["cancelled"] is True
            gate.open()
            assert answer.result().json()["choices"][0]["finish_reason"] == "abort"
        server.wait_idle()
        assert ask(server, long_prompt(2), 5) == reply(long_prompt(2), 5)


def test_queue_timeout_counts_until_the_prefill_starts(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    options = ("--max-num-seqs", "1", "--queue-timeout", "1", "--max-num-batched-tokens", "256")
    with (
        ServerProcess(*ROLES, *options, env=gate.env) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        server.wait_ready()
        wait_up(server)
        gate.order("prefill 0")
        first = pool.submit(ask, server, long_prompt(1), 5)
        gate.hold_in_prefill()
        second = pool.submit(ask, server, long_prompt(2), 5)
        time.sleep(1.5)  # longer than the timeout
        gate.open()
        assert first.result() == reply(long_prompt(1), 5)
        assert "queue" in str(second.result())
        server.wait_idle()


def test_number_of_prefill_replicas_is_validated() -> None:
    with invalid_input("prefill_replicas"):
        ServerConfig(data_parallel_size=2, prefill_replicas=2)
    with invalid_input("prefill_replicas"):
        ServerConfig(prefill_replicas=1)
    config = ServerConfig(data_parallel_size=2, prefill_replicas=1)
    assert config.engine_of_replica.cache.kv_transfer == "shm"
    ray: dict[str, Any] = {
        "data_parallel_size": 2,
        "prefill_replicas": 1,
        "data_parallel_backend": "ray",
    }
    on_ray = ServerConfig(engine=EngineConfig.of(n_threads=1), **ray)
    assert on_ray.engine_of_replica.cache.kv_transfer == "tcp"
    with pytest.raises(InvalidInputError, match="tcp with data_parallel_backend ray"):
        ServerConfig(engine=EngineConfig.of(n_threads=1, kv_transfer="shm"), **ray)
