"""/v1/responses with `background: true`: polled, streamed, resumed, cancelled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_helpers import error_of
from server_helpers import Gate, ServerProcess, wait_for

PATH = "/v1/responses"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def server(gate: Gate) -> Iterator[ServerProcess]:
    with ServerProcess("--api-key", "key-a", "--api-key", "key-b", env=gate.env) as process:
        process.wait_ready()
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client(key="key-a") as found:
        yield found


def create(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"input": "hi", "max_output_tokens": 8, "background": True, **fields}
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def poll(client: httpx.Client, response_id: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"{PATH}/{response_id}").json()
    return found


def ended(client: httpx.Client, response_id: str) -> dict[str, Any]:
    pending = ("queued", "in_progress")
    wait_for(lambda: poll(client, response_id)["status"] not in pending, "the end of a response")
    return poll(client, response_id)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data:")]


def test_response_is_generated_without_a_connection(client: httpx.Client) -> None:
    plain = create(client, background=False, temperature=0)
    first = create(client, temperature=0)
    assert first["status"] == "queued" and first["background"] is True and first["output"] == []
    done = ended(client, first["id"])
    assert done["status"] in ("completed", "incomplete") and done["id"] == first["id"]
    assert done["output"][0]["content"][0]["text"] == plain["output"][0]["content"][0]["text"]
    assert done["usage"]["output_tokens"] == 8
    follow = create(client, previous_response_id=first["id"], background=False)  # it is stored
    assert follow["previous_response_id"] == first["id"]
    assert error_of(client.post(f"{PATH}/{first['id']}/cancel"), 400)
    assert client.delete(f"{PATH}/{first['id']}").json()["deleted"] is True
    error_of(client.get(f"{PATH}/{first['id']}"), 404)


def test_stream_can_be_resumed(client: httpx.Client) -> None:
    body = {"input": "hi", "max_output_tokens": 8, "background": True, "stream": True}
    events = events_of(client.post(PATH, json=body))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    name = events[0]["response"]["id"]
    again = events_of(client.get(f"{PATH}/{name}", params={"stream": True}))
    assert again == events
    rest = client.get(f"{PATH}/{name}", params={"stream": True, "starting_after": 3})
    assert events_of(rest) == events[4:]
    last = events_of(client.get(f"{PATH}/{name}", params={"stream": True, "starting_after": 999}))
    assert last == []
    plain = create(client, background=False)["id"]
    error_of(client.get(f"{PATH}/{plain}", params={"stream": True}), 404)


def test_cancel_ends_a_running_response(client: httpx.Client, gate: Gate) -> None:
    gate.order("wait")
    first = create(client, max_output_tokens=64)
    gate.hold()
    assert poll(client, first["id"])["status"] in ("queued", "in_progress")
    cancelled = client.post(f"{PATH}/{first['id']}/cancel").json()
    assert cancelled["status"] == "cancelled" and cancelled["id"] == first["id"]
    gate.open()
    assert poll(client, first["id"])["status"] == "cancelled"
    again = client.post(f"{PATH}/{first['id']}/cancel")  # idempotent
    assert again.json()["status"] == "cancelled"
    events = events_of(client.get(f"{PATH}/{first['id']}", params={"stream": True}))
    assert events[-1]["type"] == "response.cancelled"
    assert ended(client, create(client)["id"])["usage"]["output_tokens"] == 8  # others go on


def test_responses_belong_to_their_key(server: ServerProcess, client: httpx.Client) -> None:
    first = create(client)
    with server.client(key="key-b") as other:
        error_of(other.get(f"{PATH}/{first['id']}"), 404)
        error_of(other.post(f"{PATH}/{first['id']}/cancel"), 404)
        error_of(other.delete(f"{PATH}/{first['id']}"), 404)
    assert ended(client, first["id"])["usage"]


def test_failure_is_a_status(client: httpx.Client, gate: Gate) -> None:
    gate.order("raise once")
    first = create(client)
    done = ended(client, first["id"])
    assert done["status"] == "failed" and done["error"]["code"] == "server_error"
    gate.open()


def test_background_responses_are_stored(client: httpx.Client) -> None:
    body = {"input": "hi", "background": True, "store": False}
    assert error_of(client.post(PATH, json=body), 400)["param"] == "store"
    long = {"input": "x" * 5000, "background": True}  # errors of the request are immediate
    assert error_of(client.post(PATH, json=long), 400)["param"] == "input"
