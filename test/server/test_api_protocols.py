"""Limits, keys, failures and errors of every API but OpenAI's chat, in its own format."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fault_engine import STEP_SECONDS
from http_helpers import CANARY, KEYS, TELLING
from server_helpers import Gate, ServerProcess
from wire_helpers import post_bytes, reset

MESSAGES = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Api:
    path: str
    body: dict[str, Any]
    limit: Callable[[int], dict[str, Any]]  # n -> the fields that set max_tokens
    message: Callable[[Any], str]  # error body -> message

    def of(self, tokens: int, **fields: Any) -> dict[str, Any]:
        return {**self.body, **self.limit(tokens), **fields}


def in_error(body: Any) -> str:
    return str(body["error"]["message"])


APIS = {
    "responses": Api(
        "/v1/responses", {"input": "hi"}, lambda n: {"max_output_tokens": n}, in_error
    ),
    "anthropic": Api("/v1/messages", {"messages": MESSAGES}, lambda n: {"max_tokens": n}, in_error),
    "ollama chat": Api(
        "/api/chat",
        {"model": "fake", "messages": MESSAGES},
        lambda n: {"options": {"num_predict": n}},
        lambda body: str(body["error"]),
    ),
    "ollama generate": Api(
        "/api/generate",
        {"model": "fake", "prompt": "hi"},
        lambda n: {"options": {"num_predict": n}},
        lambda body: str(body["error"]),
    ),
}
every_api = pytest.mark.parametrize("api", APIS.values(), ids=list(APIS))


def refused(api: Api, response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    return api.message(response.json())


@every_api
def test_requires_a_key_in_either_header(server: ServerProcess, api: Api) -> None:
    with server.client() as client:
        refused(api, client.post(api.path, json=api.of(2)), 401)
        for headers in (
            {"x-api-key": KEYS[0]},
            {"Authorization": f"Bearer {KEYS[1]}"},
            {"Authorization": "Bearer wrong", "x-api-key": KEYS[1]},
        ):
            answer = client.post(api.path, json=api.of(2, stream=False), headers=headers)
            assert answer.status_code == 200, answer.text
        refused(api, client.post(api.path, json=api.of(2), headers={"x-api-key": "no"}), 401)


@every_api
def test_errors_use_the_format_of_the_api(client: httpx.Client, api: Api) -> None:
    assert "nope" in refused(api, client.post(api.path, json=api.of(2, model="nope")), 404)
    assert "context" not in api.body
    message = refused(api, client.post(api.path, content=b"{", headers=JSON), 400)
    assert message == "the body is not valid JSON"
    assert refused(api, client.post(api.path, content=b"x", headers=PLAIN), 415)
    assert refused(api, client.post(api.path, json=api.of(2, stream="yes")), 400)
    assert refused(api, client.put(api.path, json={}), 405)
    long = json.dumps(api.of(2)).replace("hi", "x" * 5000)
    assert "tokens" in refused(api, client.post(api.path, content=long, headers=JSON), 400)


JSON = {"Content-Type": "application/json"}
PLAIN = {"Content-Type": "text/plain"}


def test_ollama_accepts_missing_content_type_except_from_web_pages(client: httpx.Client) -> None:
    body = json.dumps({"model": "fake", "messages": MESSAGES, "options": {"num_predict": 2}})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for headers in ({}, form):
        assert client.post("/api/chat", content=body, headers=headers).status_code == 200
        page = {**headers, "Origin": "https://example.org"}
        assert client.post("/api/chat", content=body, headers=page).status_code == 403
        assert client.post("/v1/responses", content=body, headers=headers).status_code == 415


def wrong_bodies() -> list[tuple[str, Any]]:
    part = {"type": CANARY, "text": CANARY}
    return [
        ("/v1/responses", {"input": [{"role": CANARY, "content": "x"}]}),
        ("/v1/responses", {"input": [{"type": CANARY}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [part]}]}),
        (
            "/v1/responses",
            {"input": "x", "tools": [{"type": CANARY}], "tool_choice": "required"},
        ),
        ("/v1/responses", {"input": "x", "tool_choice": {"type": CANARY}, "tools": [FUNCTION]}),
        ("/v1/responses", {"input": "x", "include": CANARY}),
        ("/v1/responses", {"input": "x", "previous_response_id": CANARY}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": CANARY}]}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": f"msg_{CANARY}_0"}]}),
        ("/v1/responses", {"input": "x", "metadata": {CANARY: CANARY * 100}}),
        ("/v1/responses", {"input": "x", "temperature": CANARY}),
        ("/v1/messages", {"messages": [{"role": CANARY, "content": "x"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [part]}]}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": CANARY}),
        (
            "/v1/messages",
            {
                "messages": MESSAGES,
                "tools": [{"name": CANARY, "type": CANARY}],
                "tool_choice": {"type": "tool", "name": CANARY},
            },
        ),
        ("/v1/messages", {"messages": MESSAGES, "stop_sequences": [1]}),
        ("/v1/messages/count_tokens", {"messages": []}),
        ("/api/chat", {"model": "fake", "messages": [{"role": CANARY}]}),
        ("/api/chat", {"model": "fake", "messages": MESSAGES, "options": [CANARY]}),
        ("/api/chat", {"model": "fake", "messages": MESSAGES, "options": {"num_predict": CANARY}}),
        ("/api/chat", {"model": "fake", "messages": MESSAGES, "format": CANARY}),
        ("/api/generate", {"model": "fake", "prompt": "x", "images": [CANARY]}),
        ("/api/generate", {"model": "fake", "prompt": "x", "suffix": CANARY}),
        ("/api/show", {"model": ""}),
        ("/infill", {"input_prefix": CANARY, "input_suffix": CANARY}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{CANARY: CANARY}]}),
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": [CANARY]}}),
        ("/completion", {"prompt": {"prompt_string": [CANARY]}}),
        ("/completion", {"prompt": "a", "t_max_predict_ms": CANARY}),
        ("/embedding", {"content": ["a", {CANARY: CANARY}]}),
        ("/embedding", {"content": "a", "input": CANARY}),
        ("/rerank", {"query": "a", "documents": [CANARY], "texts": [CANARY]}),
        ("/rerank", {"query": "a", "texts": [{CANARY: 1}]}),
    ]


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


def test_errors_do_not_leak_client_text(client: httpx.Client, server: ServerProcess) -> None:
    for path, body in wrong_bodies():
        response = client.post(path, json=body)
        assert 400 <= response.status_code < 500, (path, body, response.text)
        assert not TELLING.search(response.text), (path, response.text)
    for path in (f"/v1/responses/{CANARY}", f"/api/{CANARY}"):
        assert not TELLING.search(client.get(path).text)
    assert not any(CANARY in line for line in server.log)


def test_empty_model_name_means_default(client: httpx.Client) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x", "max_tokens": 1},
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
        "/v1/responses": {"input": "x", "max_output_tokens": 1},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
        "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 1}, "stream": False},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [5]},
    }
    for path, body in bodies.items():
        response = client.post(path, json={**body, "model": ""})
        assert response.status_code == 200, (path, response.text)
        assert client.post(path, json={**body, "model": " "}).status_code == 404, path


def test_router_errors_use_the_format_of_their_api(client: httpx.Client) -> None:
    anthropic = client.post("/v1/messages", json={"messages": MESSAGES, "model": "x"}).json()
    assert anthropic["type"] == "error" and anthropic["error"]["type"] == "not_found_error"
    assert set(anthropic) == {"type", "error", "request_id"}
    assert set(client.post("/api/chat", json={"model": "x"}).json()) == {"error"}
    openai = client.post("/v1/responses", json={"input": "x", "model": "x"}).json()
    assert openai["error"]["code"] == "model_not_found" and openai["error"]["param"] == "model"


# ---- one client among others ---------------------------------------------------------------------


@dataclass
class Gated:
    server: ServerProcess
    gate: Gate


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gated]:
    """A small server whose engine can be paused or made to fail."""
    gate = Gate(tmp_path_factory.mktemp("gate"))
    options = ("--max-queued", "0", "--max-num-seqs", "2")
    with ServerProcess(*options, env={**gate.env, STEP_SECONDS: "0.005"}) as server:
        yield Gated(server.wait_ready(), gate)


@every_api
@pytest.mark.parametrize("stream", [False, True])
def test_full_server_rejects_until_a_client_disconnects(
    gated: Gated, api: Api, stream: bool
) -> None:
    server, gate = gated.server, gated.gate
    gate.order("wait")
    body = api.of(1000, stream=stream)
    connections = [raw_post(server, api.path, body) for _ in range(2)]
    gate.hold()
    server.wait_for(lambda: full(server, api), "a full server")
    with server.client() as client:
        response = client.post(api.path, json=body)
        assert "full" in refused(api, response, 429)
        assert int(response.headers["Retry-After"]) >= 1
    connections[0].close()
    reset(connections[1])
    server.wait_for(lambda: server.num_connections == 0, "the disconnects to be noticed")
    gate.open()
    server.wait_idle()


@every_api
@pytest.mark.parametrize("stream", [False, True])
def test_failed_step_returns_500_and_next_request_succeeds(
    gated: Gated, api: Api, stream: bool
) -> None:
    gated.server.wait_idle()  # no step of an earlier request may fail
    gated.gate.order("raise once")
    with gated.server.client() as client:
        response = client.post(api.path, json=api.of(9, stream=stream))
        assert "engine failed" in refused(api, response, 500)
        assert client.post(api.path, json=api.of(2, stream=stream)).status_code == 200


def full(server: ServerProcess, api: Api) -> bool:
    with server.client() as client:
        return client.post(api.path, json=api.of(1, stream=False), timeout=5).status_code == 429


def raw_post(server: ServerProcess, path: str, body: dict[str, Any]) -> socket.socket:
    connection = server.connect()
    connection.sendall(post_bytes(body, path))
    return connection


@every_api
def test_failed_stream_ends_with_error_event(gated: Gated, api: Api) -> None:
    with (
        gated.server.client() as client,
        client.stream("POST", api.path, json=api.of(1000, stream=True)) as response,
    ):
        lines = response.iter_lines()
        assert next(lines)
        gated.gate.order("raise once")
        rest = [line for line in lines if line]
    last = json.loads(rest[-1].removeprefix("data: "))
    found = last.get("response", last)["error"]
    text = found if isinstance(found, str) else found["message"]
    assert text == "the engine failed on this request"
    assert not re.search("secret|0x7f|/root", "".join(rest))
    gated.server.wait_idle()


def test_log_and_metrics_cover_every_api(server: ServerProcess, client: httpx.Client) -> None:
    for api in APIS.values():
        before = server.metric("request_success_total", KEYS[0])
        answer = client.post(api.path, json=api.of(2, stream=False))
        assert answer.status_code == 200
        assert server.metric("request_success_total", KEYS[0]) == before + 1
        name = answer.headers["x-request-id"]
        server.wait_for(
            lambda name=name: any(e.get("request_id") == name for e in server.events()), "a line"
        )
        line = next(event for event in server.events() if event.get("request_id") == name)
        assert line["route"] == api.path and line["completion_tokens"] == 2
