"""`priority` and `timeout` over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fault_engine import STEP_SECONDS
from http_helpers import chat, error_of
from server_helpers import Gate, ServerProcess
from wire_helpers import sse_events

PATH = "/v1/completions"
KEY = "k"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def server(gate: Gate) -> Iterator[ServerProcess]:
    """A server with max_num_seqs 1."""
    with ServerProcess(
        "--max-num-seqs", "1", "--api-key", KEY, env={STEP_SECONDS: "0.002", **gate.env}
    ) as process:
        yield process.wait_ready()


@pytest.fixture
def client(server: ServerProcess, gate: Gate) -> Iterator[httpx.Client]:
    with server.client(KEY) as client:
        yield client
    gate.open()
    server.wait_idle(KEY)


def body(max_tokens: int = 20, **fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, **fields}


def test_lower_priority_values_run_first_and_preempt(
    server: ServerProcess, client: httpx.Client, gate: Gate
) -> None:
    asks = [("first", 0), ("later", 5), ("equal", 0), ("urgent", -3)]
    gate.order("wait")
    with ThreadPoolExecutor(len(asks)) as pool:
        answers: list[Future[httpx.Response]] = []
        for number, (name, priority) in enumerate(asks):
            fields = {"json": body(priority=priority), "headers": {"x-request-id": name}}
            answers.append(pool.submit(client.post, PATH, **fields))
            server.wait_for(
                lambda n=number: server.metric("key_open_sequences", KEY) == n + 1, "admission"
            )
            gate.hold()  # the first one runs, the others wait
        gate.open()
        texts = {answer.result(60).json()["choices"][0]["text"] for answer in answers}
    assert len(texts) == 1  # the preempted request is complete
    names = [name for name, _ in asks]

    def ended() -> list[str]:
        found = [event.get("request_id") for event in server.events()]
        return [name for name in found if name in names]

    server.wait_for(lambda: len(ended()) == len(names), "a line in the log for each")
    assert ended() == ["urgent", "first", "equal", "later"]


def test_timeout_of_a_waiting_request_is_a_504(
    server: ServerProcess, client: httpx.Client, gate: Gate
) -> None:
    gate.order("wait")
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(client.post, PATH, json=body(2))
        gate.hold()
        answers = [
            pool.submit(client.post, PATH, json=body(timeout=0.05, stream=stream))
            for stream in (False, True)
        ]
        server.wait_for(lambda: server.metric("key_open_sequences", KEY) == 3, "admission")
        time.sleep(0.1)
        gate.open()
        for answer in answers:
            assert error_of(answer.result(60), 504)["code"] == "timeout"
        assert running.result(60).json()["usage"]["completion_tokens"] == 2


def test_timeout_of_a_running_request_returns_partial_output(
    client: httpx.Client, gate: Gate
) -> None:
    for timeout in (0.5, 2.0, 8.0, 30.0):  # retried until it starts in time on a slow machine
        gate.open()
        sent = time.monotonic()
        fields = body(100_000, timeout=timeout, stream=True)
        with client.stream("POST", PATH, json=fields) as response:
            if response.status_code == 504:
                continue
            assert response.status_code == 200
            events = sse_events(response)
            first = json.loads(next(iter(events)))
            gate.hold()
            time.sleep(max(0.0, sent + timeout + 0.05 - time.monotonic()))
            gate.open()
            chunks = [first, *(json.loads(e) for e in events if e != "[DONE]")]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
        assert reasons[-1] == "timeout" and set(reasons[:-1]) == {None}
        return
    raise AssertionError("nothing began within 30 s")


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", 1001), ("priority", -1001), ("priority", 0.5), ("priority", "high"),
     ("timeout", 0), ("timeout", -1), ("timeout", "soon")],
)  # fmt: skip
def test_invalid_priorities_and_timeouts(client: httpx.Client, field: str, value: Any) -> None:
    for path, fields in ((PATH, body()), ("/v1/chat/completions", chat())):
        error = error_of(client.post(path, json={**fields, field: value}), 400)
        assert error["param"] == field and field in error["message"]
