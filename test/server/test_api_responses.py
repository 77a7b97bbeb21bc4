"""/v1/responses: items, stored conversations, order of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_helpers import error_of
from script import ASK_COUNT, COUNT, HELLO
from scripted_server import scripted_server
from server_helpers import ServerProcess

from llaisys.common.errors import InvalidInputError
from llaisys.server.errors import SessionLimitError
from llaisys.server.responses.items import chat_messages
from llaisys.server.sessions.responses import ResponseStore
from llaisys.server.sessions.store import SessionStore

PATH = "/v1/responses"
KEYS = ("key-a", "key-b")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = [item for key in KEYS for item in ("--api-key", key)]
    with scripted_server(tmp_path_factory.mktemp("responses"), *options) as process:
        yield process


def create(client: httpx.Client, status: int = 200, **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json=fields)
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()
    return found


def events(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    with client.stream("POST", PATH, json={**fields, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = list(response.iter_lines())
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def text_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


def test_previous_response_continues_for_its_owner_only(
    server: ServerProcess, client: httpx.Client
) -> None:
    first = create(client, input="Hi", instructions="Be brief.")
    assert text_of(first) == HELLO and first["instructions"] == "Be brief."
    second = create(client, input=ASK_COUNT, previous_response_id=first["id"])
    assert text_of(second) == COUNT
    counted = create(client, input="Once more.", previous_response_id=second["id"])
    assert text_of(counted) == COUNT  # its prompt has the previous question
    stored = client.get(f"/v1/sessions/{first['id']}").json()["messages"]
    contents = [message["content"] for message in stored]
    assert contents == ["Hi", HELLO, ASK_COUNT, COUNT, "Once more.", COUNT]  # no instructions
    assert client.get("/v1/sessions").json()["data"] == []  # responses are not chats
    branch = create(client, input="Elsewhere.", previous_response_id=first["id"])
    assert text_of(branch) == HELLO
    own = client.get(f"/v1/sessions/{branch['id']}").json()["messages"]
    assert [message["content"] for message in own] == ["Hi", HELLO, "Elsewhere.", HELLO]
    with server.client(KEYS[1]) as other:
        assert other.get(f"{PATH}/{first['id']}").status_code == 404
        assert other.delete(f"{PATH}/{first['id']}").status_code == 404
        error = create(other, 400, input="x", previous_response_id=first["id"])["error"]
        assert error["code"] == "previous_response_not_found"
        item = {"type": "item_reference", "id": first["output"][0]["id"]}
        assert create(other, 404, input=[item])["error"]["code"] == "item_not_found"
    assert client.get(f"{PATH}/{first['id']}").json() == first


def test_store_false_stores_nothing(client: httpx.Client) -> None:
    response = create(client, input="Hi", store=False)
    assert response["store"] is False
    assert client.get(f"{PATH}/{response['id']}").status_code == 404
    create(client, 400, input="x", previous_response_id=response["id"])


def test_deleting_the_last_response_deletes_its_session(client: httpx.Client) -> None:
    first = create(client, input="Hi")
    second = create(client, input="Hi", previous_response_id=first["id"])
    for response in (first, second):
        assert client.delete(f"{PATH}/{response['id']}").json()["deleted"] is True
        assert client.get(f"{PATH}/{response['id']}").status_code == 404
    assert client.get(f"/v1/sessions/{first['id']}").status_code == 404


def test_item_reference_resolves_to_stored_item(client: httpx.Client) -> None:
    first = create(client, input=ASK_COUNT)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": ASK_COUNT}]},
        {"type": "item_reference", "id": first["output"][0]["id"]},
        {"role": "user", "content": "Go on."},
    ]
    response = create(client, input=items)
    stored = client.get(f"/v1/sessions/{response['id']}").json()["messages"]
    assert stored[1] == {"role": "assistant", "content": COUNT}


def test_stream_events_are_numbered_and_end_with_stored_response(
    client: httpx.Client,
) -> None:
    body = {"input": ASK_COUNT, "stream": True, "max_output_tokens": 10, "metadata": {"k": "v"}}
    with client.stream("POST", PATH, json=body) as response:
        lines = list(response.iter_lines())
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events] == names
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert names[0] == "response.created" and names[-1] == "response.incomplete"
    final = events[-1]["response"]
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["output"][0]["status"] == "incomplete" and final["metadata"] == {"k": "v"}
    assert final["usage"]["output_tokens"] == 10
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text_of(final) == COUNT[:10]
    assert client.get(f"{PATH}/{final['id']}").json() == final


# ---- items ---------------------------------------------------------------------------------------


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}


def test_consecutive_assistant_items_become_one_message() -> None:
    output = {"type": "function_call_output", "call_id": "a", "output": "1"}
    messages = chat_messages(
        [
            {"role": "developer", "content": "d"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
            call("a"),
            call("b"),
            output,
            {"role": "assistant", "content": "y"},
            {"role": "assistant", "content": "z"},
        ]
    )
    assert [message["role"] for message in messages] == [
        *("developer", "assistant", "tool", "assistant", "assistant")
    ]
    assistant = messages[1]
    assert (assistant["content"], assistant["reasoning_content"]) == ("x", "t")
    assert [made["id"] for made in assistant["tool_calls"]] == ["a", "b"]
    assert messages[2] == {"role": "tool", "tool_call_id": "a", "content": "1"}


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"role": "unknown", "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "[0].content[0]",
        ),
        ({"type": "function_call", "call_id": "a", "arguments": "{}"}, "input[0].name"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
        ({"type": "computer_call"}, "input[0].type"),
        (5, "input[0]"),
    ],
)
def test_invalid_item_is_named(item: Any, field: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        chat_messages([item])
    assert error.value.field is not None and error.value.field.endswith(field)


# ---- the store -----------------------------------------------------------------------------------


def user_message(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def keep(store: ResponseStore, name: str, text: str, before: Any = None) -> None:
    await store.store("o", {"id": name}, before, user_message(text), "m")


@pytest.mark.parametrize("limit", ["sessions", "bytes"])
def test_oldest_responses_are_evicted_but_not_sessions(tmp_path: Path, limit: str) -> None:
    async def run() -> None:
        many = {"max_sessions": 4} if limit == "sessions" else {"max_owner_bytes": 20_000}
        sessions = SessionStore(tmp_path / "s.db", **many)
        store = ResponseStore(sessions)
        await sessions.create("o", "kept", messages=user_message("a chat of its own"))
        for number in range(9):
            await keep(store, f"resp_{number}", "x" * 5000)
        assert await store.get("o", "resp_0") is None
        assert json.loads(await store.get("o", "resp_8") or "") == {"id": "resp_8"}
        assert await sessions.get("o", "kept") is not None
        # A session is not evicted for its own continuation.
        place = await store.position("o", "resp_8")
        await keep(store, "resp_9", "y" * 5000, place)
        following = await store.position("o", "resp_9")
        assert following is not None and following.session == "resp_8"
        assert [m["content"][0] for m in following.messages] == ["x", "y"]
        if limit == "bytes":
            with pytest.raises(SessionLimitError):
                await store.make_room("o", user_message("z" * 30_000))
        sessions.close()

    asyncio.run(run())


def test_two_continuations_of_one_response_are_separate(tmp_path: Path) -> None:
    async def run() -> None:
        sessions = SessionStore(tmp_path / "s.db")
        store = ResponseStore(sessions)
        await keep(store, "resp_a", "a")
        place = await store.position("o", "resp_a")
        await keep(store, "resp_b", "b", place)
        await keep(store, "resp_c", "c", place)
        for name, expected in (("resp_b", "ab"), ("resp_c", "ac")):
            found = await store.position("o", name)
            assert found is not None
            assert "".join(message["content"] for message in found.messages) == expected
        sessions.close()

    asyncio.run(run())


# ---- logprobs, sampling, input items, cancellation -----------------------------------------------


def test_logprobs_of_the_text(client: httpx.Client) -> None:
    body = {"top_k": 5, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    found = create(client, input="hi", store=False, **body)
    (part,) = found["output"][-1]["content"]
    assert part["logprobs"] and all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert found["top_logprobs"] == 2
    assert create(client, input="hi", store=False)["output"][-1]["content"][0]["logprobs"] == []
    streamed = events(client, input="hi", store=False, **body)
    deltas = [e for e in streamed if e["type"] == "response.output_text.delta"]
    sent = [entry for delta in deltas for entry in delta["logprobs"]]
    assert [entry["token"] for entry in sent] == [entry["token"] for entry in part["logprobs"]]
    (done,) = [e for e in streamed if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == sent
    kept = client.get(f"/v1/responses/{create(client, input='hi', **body)['id']}").json()
    assert kept["output"][-1]["content"][0]["logprobs"] == []  # they are not stored


def test_timings_and_progress_in_events(client: httpx.Client) -> None:
    fields = {"timings_per_token": True, "return_progress": True}
    streamed = events(client, input="hi " * 20, store=False, **fields)
    assert any("prompt_progress" in e for e in streamed if e["type"] == "response.in_progress")
    deltas = [e for e in streamed if e["type"] == "response.output_text.delta"]
    assert all("prompt_per_second" in e["timings"] for e in deltas)
    assert streamed[-1]["timings"]["predicted_n"] >= 1
    assert not any("timings" in e for e in events(client, input="hi", store=False))


def test_input_tokens_are_counted(client: httpx.Client) -> None:
    counted = client.post("/v1/responses/input_tokens", json={"input": "hi"}).json()
    usage = create(client, input="hi", store=False)["usage"]
    expected = {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    assert counted == expected


def test_input_items_of_a_chain(client: httpx.Client) -> None:
    first = create(client, input="one")
    second = create(client, input="two", previous_response_id=first["id"])
    path = f"/v1/responses/{second['id']}/input_items"
    listed = client.get(path, params={"order": "asc"}).json()
    texts = [item["content"][0]["text"] for item in listed["data"]]
    assert [texts[0], texts[-1]] == ["one", "two"] and len(texts) == 3
    assert [item["role"] for item in listed["data"]] == ["user", "assistant", "user"]
    latest = client.get(path, params={"limit": 1}).json()
    assert latest["data"] == listed["data"][-1:] and latest["has_more"] is True
    after = client.get(path, params={"after": latest["last_id"]}).json()
    assert after["data"] == listed["data"][-2::-1] and after["has_more"] is False
    error_of(client.get(path, params={"after": "msg_none"}), 400)
    error_of(client.get("/v1/responses/resp_none/input_items"), 404)


def test_complete_response_cannot_be_cancelled(client: httpx.Client) -> None:
    stored = create(client, input="hi")
    error = error_of(client.post(f"/v1/responses/{stored['id']}/cancel"), 400)
    assert error["code"] == "response_not_cancellable"
    error_of(client.post("/v1/responses/resp_none/cancel"), 404)
