"""Isolation of clients: private prefix caching, fair scheduling, and request ids in the logs of
both processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fault_engine import STEP_SECONDS
from server_helpers import LONG, ServerProcess

from llaisys.engine.worker import STAGES
from llaisys.server.config import Limits, ServerConfig

PATH = "/v1/completions"
KEY, OTHER = "key-one", "key-two"
PROMPT = "a prompt of some length that fills more than one block of the cache"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with max_num_seqs 4."""
    with ServerProcess(
        "--api-key", KEY, "--api-key", OTHER, "--log-level", "debug",
        "--max-num-seqs", "4", "--max-num-batched-tokens", "256",
        env={STEP_SECONDS: "0.005"},
        session_file=tmp_path_factory.mktemp("sharing") / "s.db",
    ) as process:  # fmt: skip
        yield process.wait_ready()


def cached_tokens(server: ServerProcess, key: str, **fields: Any) -> int:
    with server.client(key) as client:
        answer = client.post(PATH, json={"prompt": PROMPT, "max_tokens": 2, **fields})
    count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_prefix_cache_is_private_to_a_key(server: ServerProcess) -> None:
    assert cached_tokens(server, KEY) == 0
    assert cached_tokens(server, KEY) > 0
    hits = server.metric("prefix_cache_hits_total", KEY)
    assert cached_tokens(server, OTHER) == 0
    assert cached_tokens(server, OTHER, cache_salt="x") == 0
    assert server.metric("prefix_cache_hits_total", KEY) == hits
    assert cached_tokens(server, OTHER, cache_salt="x") > 0


def test_shared_prefix_cache_is_visible_across_keys(tmp_path: Path) -> None:
    options = ("--api-key", KEY, "--api-key", OTHER, "--share-prefix-cache")
    with ServerProcess(*options, session_file=tmp_path / "s.db") as shared:
        shared.wait_ready()
        assert cached_tokens(shared, KEY) == 0
        hits = shared.metric("prefix_cache_hits_total", KEY)
        assert cached_tokens(shared, OTHER) > 0
        assert shared.metric("prefix_cache_hits_total", KEY) > hits
        assert cached_tokens(shared, OTHER, cache_salt="x") == 0  # a salt is still private


@pytest.mark.parametrize(
    ("keys", "shared", "private"),
    [
        ((), False, False),
        (("a",), False, True),  # SIGHUP may add a second key
        (("a", "b"), False, True),
        (("a", "b"), True, False),
    ],
)
def test_prefixes_are_private_when_there_are_keys(
    keys: tuple[str, ...], shared: bool, private: bool
) -> None:
    config = ServerConfig(api_keys=keys, share_prefix_cache=shared)
    assert config.has_private_prefixes is private


def test_one_key_cannot_take_the_whole_capacity() -> None:
    several = ServerConfig(api_keys=("a", "b"))
    assert several.max_per_key == (256 + 256) // 2
    assert ServerConfig(api_keys=("a",)).max_per_key == 0
    assert ServerConfig(api_keys=("a", "b"), limits=Limits(max_per_key=0)).max_per_key == 0
    assert ServerConfig(limits=Limits(max_per_key=7)).max_per_key == 7


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_request_with_many_choices_does_not_starve_others(server: ServerProcess, key: str) -> None:
    """Neither a second request of the same key nor one of another key waits."""
    with (
        server.client(KEY) as greedy,
        server.client(key) as modest,
        ThreadPoolExecutor(1) as pool,
        greedy.stream("POST", PATH, json={**LONG, "n": 64, "stream": True}) as stream,
    ):
        assert stream.status_code == 200  # it runs on all four sequences
        answer = pool.submit(
            modest.post, PATH, json={"prompt": "x", "max_tokens": 20, "ignore_eos": True}
        )
        assert answer.result(20).json()["usage"]["completion_tokens"] == 20
        server.wait_for(lambda: server.metric("num_requests_running", KEY) == 4, "full again")
    server.wait_idle(KEY)


def test_request_id_is_in_the_logs_of_both_processes(server: ServerProcess) -> None:
    with server.client(KEY) as client:
        headers = {"X-Request-Id": "trace-77"}
        assert client.post(PATH, json={"prompt": "x", "n": 2}, headers=headers).status_code == 200

    def loggers() -> set[str]:
        return {event["logger"] for event in server.events() if "trace-77" in str(event)}

    server.wait_for(lambda: loggers() >= {"llaisys.server", "llaisys.engine"}, "the log lines")


def test_stage_times_are_in_the_metrics(server: ServerProcess) -> None:
    def stages() -> set[str]:
        with server.client(KEY) as client:
            client.post(PATH, json={"prompt": "x", "max_tokens": 2})
            lines = client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("llaisys:engine_stage_seconds_total{")]
        return {stage for stage in STAGES for line in found if f'stage="{stage}"' in line}

    server.wait_for(lambda: stages() == set(STAGES), "the stages")


def test_request_id_may_be_used_concurrently(server: ServerProcess) -> None:
    body = {"prompt": "x", "max_tokens": 30, "n": 2, "ignore_eos": True}
    with server.client(KEY) as client, ThreadPoolExecutor(6) as pool:
        answers = [
            pool.submit(client.post, PATH, json=body, headers={"X-Request-Id": name})
            for name in ("same", "same", "same#0", "same~1", "same")
        ]
        assert [answer.result(30).status_code for answer in answers] == [200] * 5
