"""Sessions that exceed the context: old turns are dropped and reported."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_fakes import FakeTokenizer
from http_helpers import CHAT, chat, error_of, reply
from server_helpers import ServerProcess
from wire_helpers import sse_events

from llaisys.server.generation.history import MESSAGE_TOKENS, Recent, answer_room

TOKENIZER = FakeTokenizer()
CONTEXT = 2048


def conversation(turns: int, words: int = 5) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": "be brief"}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn} " + "x" * words})
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    return [*messages, {"role": "user", "content": "and now?"}]


def render(messages: Any) -> list[int]:
    return TOKENIZER.encode_chat(list(messages))


def count(text: str) -> int:
    return len(TOKENIZER.encode(text))


@pytest.mark.parametrize("turns", [0, 1, 2, 7, 50, 200])
@pytest.mark.parametrize("most", [30, 100, 333, 2000])
def test_remaining_turns_fit_and_keep_the_system_message(turns, most):
    messages = conversation(turns)
    seen: list[Any] = []

    def encode(kept: Any) -> list[int]:
        seen.append(list(kept))
        return render(kept)

    ids, dropped = Recent(messages, 1, most).render(encode, count)
    kept = seen[-1]
    assert ids == render(kept) and len(kept) + dropped == len(messages)
    assert kept[0]["role"] == "system" and kept[1]["role"] == "user" and kept[-1] == messages[-1]
    if len(render(messages)) + MESSAGE_TOKENS * len(messages) <= most:
        assert dropped == 0
    assert len(ids) <= most or len(kept) == 2
    assert len(seen) <= 10  # not one rendering per turn
    if dropped and most >= 333:  # most of the context is used
        assert len(ids) > most // 3


def test_cost_depends_on_context_not_conversation_length():
    counted = []

    def counting(text: str) -> int:
        counted.append(text)
        return count(text)

    Recent(conversation(2000), 1, 400).render(render, counting)
    assert len(counted) < 40


def test_turns_are_dropped_in_groups_to_keep_prefixes_equal():
    beginnings = set()
    for turns in range(100, 140):
        _, dropped = Recent(conversation(turns), 1, 1500).render(render, count)
        beginnings.add(dropped)
    assert len(beginnings) <= 14


def test_leaves_room_for_the_answer():
    assert answer_room(None, 2048) == 512
    assert answer_room(100, 2048) == 100
    assert answer_room(2000, 2048) == 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("long")
    with ServerProcess(
        "--context-shift", "--max-model-len", str(CONTEXT), session_file=folder / "s.db"
    ) as process:
        yield process.wait_ready()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def test_session_of_100_turns_keeps_answering(client: httpx.Client):
    system = {"role": "system", "content": "be brief"}
    truncated, times = [], []
    for turn in range(100):
        new = [{"role": "user", "content": f"question number {turn} " + "z" * 40}]
        body = chat(session_id="long", messages=[system, *new] if not turn else new, max_tokens=8)
        start = time.monotonic()
        response = client.post(CHAT, json=body)
        times.append(time.monotonic() - start)
        assert response.status_code == 200, response.text
        answer = response.json()
        truncated.append(answer["context_truncated"])
        assert answer["usage"]["prompt_tokens"] <= CONTEXT - 8
    assert not truncated[0] and truncated[-1] and truncated == sorted(truncated)
    kept = client.get("/v1/sessions/long").json()
    assert kept["num_messages"] == 201  # the stored session is complete
    assert sorted(times[-25:])[12] < 5  # a turn takes as long as it did before


def test_last_stream_chunk_reports_dropped_turns(client: httpx.Client):
    def ask(messages: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
        body = chat(messages=messages, stream=True, **fields)
        with client.stream("POST", CHAT, json=body) as response:
            return [json.loads(e) for e in sse_events(response) if e != "[DONE]"]

    chunks = ask(conversation(150), drop_old_turns=True)
    assert [c.get("context_truncated") for c in chunks] == [None] * (len(chunks) - 1) + [True]
    assert ask(conversation(1), drop_old_turns=True)[-1]["context_truncated"] is False
    assert "context_truncated" not in ask(conversation(1))[-1]


def test_dropped_turns_give_the_same_answer_as_a_shorter_chat(client: httpx.Client):
    messages = conversation(150)
    room = answer_room(6, CONTEXT)
    ids, dropped = Recent(messages, 1, CONTEXT - room).render(render, count)
    answer = client.post(CHAT, json=chat(messages=messages, drop_old_turns=True)).json()
    text = TOKENIZER.decode_tokens(ids)
    assert dropped and answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["choices"][0]["message"]["content"] == TOKENIZER.decode_tokens(reply(text, 6))


def test_new_messages_that_do_not_fit_are_rejected(client: httpx.Client):
    huge = [{"role": "user", "content": "y" * 2100}]
    for fields in ({"session_id": "fresh"}, {"drop_old_turns": True}):
        error = error_of(client.post(CHAT, json=chat(messages=huge, **fields)), 400)
        assert error["code"] == "context_length_exceeded"
    error = error_of(client.post(CHAT, json=chat(messages=conversation(150))), 400)
    assert error["code"] == "context_length_exceeded"  # without drop_old_turns: an error


def test_context_shift_keeps_the_system_message(client: httpx.Client):
    body = chat(messages=conversation(2), max_tokens=2400, ignore_eos=True, return_token_ids=True)
    answer = client.post(CHAT, json=body).json()
    assert answer["usage"]["completion_tokens"] == 2400
    tokens = answer["choices"][0]["token_ids"]
    kept = len(TOKENIZER.encode("[system]be brief"))
    again = client.post(CHAT, json={**body, "n_keep": kept}).json()
    assert again["choices"][0]["token_ids"] == tokens
    other = client.post(CHAT, json={**body, "n_keep": 0}).json()
    assert other["choices"][0]["token_ids"] != tokens
    assert error_of(client.post(CHAT, json={**body, "n_keep": -2}), 400)["param"] == "n_keep"


# ---- chains of responses -------------------------------------------------------------------------

RESPONSES = "/v1/responses"


def ask(
    client: httpx.Client, text: str, before: str | None = None, **fields: Any
) -> httpx.Response:
    body = {"input": text, "max_output_tokens": 8, "instructions": "be brief", **fields}
    return client.post(RESPONSES, json={**body, "previous_response_id": before})


def test_response_chain_continues_beyond_the_context(client: httpx.Client):
    first, before, truncated = None, None, []
    for turn in range(12):
        response = ask(client, f"question {turn} " + "z" * 300, before)
        assert response.status_code == 200, response.text
        answer = response.json()
        truncated.append(answer.get("context_truncated"))
        assert answer["truncation"] == ("disabled" if before is None else "auto")
        assert answer["usage"]["input_tokens"] <= CONTEXT - 8
        before = answer["id"]
        first = first or before
    # The first response of a chain has no context_truncated field.
    assert truncated[:2] == [None, False] and truncated[-1] is True
    assert truncated[1:] == sorted(truncated[1:])
    assert client.get(f"{RESPONSES}/{before}").json()["context_truncated"] is True
    session = client.get(f"/v1/sessions/{first}").json()
    assert session["num_messages"] == 24  # the stored session is complete

    refused = error_of(ask(client, "x", before, truncation="disabled"), 400)
    assert refused["code"] == "context_length_exceeded"
    huge = error_of(ask(client, "y" * 2100, before), 400)
    assert huge["code"] == "context_length_exceeded"

    with client.stream(
        "POST", RESPONSES,
        json={"input": "x", "previous_response_id": before, "stream": True, "max_output_tokens": 2},
    ) as stream:  # fmt: skip
        events = [json.loads(event) for event in sse_events(stream)]
    assert events[0]["response"]["context_truncated"] is True
    assert events[-1]["response"]["context_truncated"] is True


def test_truncation_auto_drops_old_items(client: httpx.Client):
    items = [{"role": m["role"], "content": m["content"]} for m in conversation(150)]
    body = {"input": items, "max_output_tokens": 4}
    refused = error_of(client.post(RESPONSES, json=body), 400)
    assert refused["code"] == "context_length_exceeded"
    answer = client.post(RESPONSES, json={**body, "truncation": "auto"}).json()
    assert answer["context_truncated"] is True and answer["truncation"] == "auto"
