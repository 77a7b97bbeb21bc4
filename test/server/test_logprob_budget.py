"""The logprob budget: reserved before generation, released when the response is sent."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from http_helpers import CHAT, chat, error_of
from server_helpers import CONTEXT, LONG, Gate, ServerProcess

from llaisys.server.errors import ApiError
from llaisys.server.http.limits import Budget

TEXT = "/v1/completions"


def test_reservation_is_released_and_one_request_may_fill_the_context() -> None:
    budget = Budget(100, "logprobs", "too_many_logprobs")
    with budget.reserve("logprobs", 60), budget.reserve("logprobs", 40):
        with pytest.raises(ApiError) as now, budget.reserve("logprobs", 101):
            pass
        assert (now.value.status, now.value.code) == (429, "too_many_logprobs")
        assert now.value.param == "logprobs" and budget.used == 100
    with budget.reserve("logprobs", 500, most_of_one=500):  # alone
        assert budget.used == 500
    assert budget.used == 0


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def server(gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file: Path = tmp_path_factory.mktemp("logprobs") / "s.db"
    with ServerProcess("--max-total-logprobs", "9", env=gate.env, session_file=file) as process:
        yield process.wait_ready()


def test_too_many_logprobs_are_rejected_before_generation(server: ServerProcess) -> None:
    with server.client() as client:
        whole = {**LONG, "max_tokens": 10**6, "logprobs": 20, "n": 2}
        error = error_of(client.post(TEXT, json=whole), 400)
        assert error["param"] == "logprobs" and str(21 * CONTEXT) in error["message"]
        error = error_of(
            client.post(CHAT, json=chat(max_tokens=None, n=3, logprobs=True, top_logprobs=20)), 400
        )
        assert error["param"] == "logprobs"
        few = {"prompt": "x", "max_tokens": 3, "n": 2, "logprobs": 20}
        assert client.post(TEXT, json=few).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_open_requests_share_the_logprob_budget(
    server: ServerProcess, gate: Gate, stream: bool
) -> None:
    body = {**LONG, "logprobs": 20, "stream": stream}
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        gate.order("wait")
        first = pool.submit(client.post, TEXT, json={**body, "max_tokens": 500})
        gate.hold()
        answer = client.post(TEXT, json=body)
        assert error_of(answer, 429)["code"] == "too_many_logprobs"
        assert answer.headers["retry-after"] == "1"
        gate.open()
        assert first.result(60).status_code == 200
        few = {"prompt": "x", "max_tokens": 3, "logprobs": 20}
        server.wait_for(lambda: client.post(TEXT, json=few).status_code == 200, "room again")
