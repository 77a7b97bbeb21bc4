"""Unknown fields and built-in tools are ignored and named in every protocol, refused in strict
mode; bad values of known fields and media stay errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from error_helpers import naming
from field_helpers import (
    CHAT,
    COMPLETIONS,
    FUNCTION,
    HI,
    MESSAGES,
    RESPONSES,
    STRICT,
    message_of,
    names,
)
from pydantic import ValidationError
from server_helpers import ServerProcess

from llaisys.server.schemas.chat import ChatCompletionRequest
from llaisys.server.schemas.fields import FieldNotes


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--no-ui", "--log-level", "debug", "--served-model-name", "fake") as process:
        yield process.wait_ready()


# ---- the rule, for each protocol -----------------------------------------------------------------

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 2},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
    MESSAGES: {"messages": HI, "max_tokens": 2},
    "/api/chat": {"model": "fake", "messages": HI, "options": {"num_predict": 2}, "stream": False},
    "/completion": {"prompt": "hi", "n_predict": 2},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
}
every_protocol = pytest.mark.parametrize("path", list(BODIES))


@every_protocol
@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, {"a": [1]}, "text", 1.5])
def test_unknown_fields_are_ignored_for_any_value(
    client: httpx.Client, path: str, value: Any
) -> None:
    response = client.post(path, json={**BODIES[path], "frobnicate": value})
    assert response.status_code == 200, response.text
    assert names(response) == {"frobnicate"}


@every_protocol
def test_strict_mode_rejects_unknown_fields_by_name(client: httpx.Client, path: str) -> None:
    body = {**BODIES[path], "frobnicate": None}
    response = client.post(path, json=body, headers=STRICT)
    assert response.status_code == 400 and "unknown field 'frobnicate'" in message_of(response)
    for value in ("false", "0", ""):
        headers = {"x-llaisys-strict-fields": value}
        assert client.post(path, json=body, headers=headers).status_code == 200


@every_protocol
@pytest.mark.parametrize("name", ["images", "audio", "video_url", "files"])
def test_media_fields_are_rejected_by_name(client: httpx.Client, path: str, name: str) -> None:
    response = client.post(path, json={**BODIES[path], name: ["data:secret"]})
    assert response.status_code == 400
    assert name in message_of(response) and "text model" in message_of(response)
    assert "secret" not in response.text
    empty = client.post(path, json={**BODIES[path], name: None})
    assert empty.status_code == 200 and names(empty) == set()


@pytest.mark.parametrize("name", ["images", "audio", "files"])
def test_media_of_a_message_are_rejected_by_name(client: httpx.Client, name: str) -> None:
    body = {"messages": [{**HI[0], name: ["x"]}], "max_tokens": 2}
    for path, more in ((CHAT, {}), ("/api/chat", {"model": "fake"})):
        response = client.post(path, json={**body, **more} if path == CHAT else {
            "model": "fake", "messages": body["messages"]})  # fmt: skip
        assert response.status_code == 400
        assert f"messages[0].{name}" in message_of(response)


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        (CHAT, {"temperature": 101}, "temperature is 101; it must be"),
        (CHAT, {"stream": "yes"}, "stream is a string; it must be"),
        (CHAT, {"stream_options": {"include_usage": 1}, "stream": True}, "include_usage is 1"),
        (CHAT, {"reasoning": {"effort": "huge"}}, 'reasoning.effort is "huge"; it must be'),
        (CHAT, {"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens is -1; it must be"),
        (CHAT, {"thinking": {"type": "maybe"}}, 'thinking.type is "maybe"'),
        (CHAT, {"enable_thinking": "no"}, "enable_thinking is a string"),
        (CHAT, {"functions": [{}]}, "functions[0].name is missing"),
        (COMPLETIONS, {"tools": [FUNCTION]}, "tools is a field of chats"),
        (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type"),
        (RESPONSES, {"conversation": "conv_1"}, "conversation is not supported"),
        (RESPONSES, {"prompt": {"id": "p"}}, "prompt is not supported"),
        (RESPONSES, {"input": [{"type": "computer_call_output"}]}, "input[0].type"),
        (MESSAGES, {"top_k": "a"}, "top_k"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens is 0"),
        ("/api/chat", {"think": "a lot"}, "think"),
        ("/api/chat", {"options": {"num_predict": "x"}}, "options.num_predict"),
        ("/completion", {"n_probs": -1}, "n_probs is -1; it must be"),
        ("/v1/embeddings", {"dimensions": 0}, "dimensions is 0; it must be"),
    ],
)
def test_invalid_value_of_a_known_field_is_an_error(
    client: httpx.Client, path: str, fields: dict[str, Any], text: str
) -> None:
    response = client.post(path, json={**BODIES[path], "frobnicate": 1, **fields})
    assert response.status_code == 400 and text in message_of(response), response.text


# ---- tools ---------------------------------------------------------------------------------------

NONE_LEFT = "it must be auto or none: this server has no tools of type web_search"
WEB_SEARCH = {"type": "web_search"}
ANTHROPIC_SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize(
    ("path", "tools", "choice", "text"),
    [
        (
            CHAT,
            [WEB_SEARCH],
            "required",
            NONE_LEFT,
        ),
        (
            CHAT,
            [FUNCTION, WEB_SEARCH],
            {"type": "web_search"},
            "is tools[1] of type web_search",
        ),
        (
            CHAT,
            [{"type": "custom", "custom": {"name": "p"}}],
            {"type": "custom", "custom": {"name": "p"}},
            "is tools[0] of type custom",
        ),
        (
            RESPONSES,
            [WEB_SEARCH],
            "required",
            NONE_LEFT,
        ),
        (
            RESPONSES,
            [WEB_SEARCH],
            {"type": "web_search"},
            "is tools[0] of type web_search",
        ),
        (
            MESSAGES,
            [ANTHROPIC_SEARCH],
            {"type": "any"},
            NONE_LEFT,
        ),
        (
            MESSAGES,
            [ANTHROPIC_SEARCH],
            {"type": "tool", "name": "web_search"},
            "tool_choice is tools[0] of type web_search_20250305",
        ),
    ],
)
def test_tool_choice_of_a_dropped_tool_is_an_error(
    client: httpx.Client, path: str, tools: list[Any], choice: Any, text: str
) -> None:
    response = client.post(path, json={**BODIES[path], "tools": tools, "tool_choice": choice})
    assert response.status_code == 400 and text in message_of(response), response.text


def test_forced_tool_choice_works_with_remaining_tools() -> None:
    named = {"type": "function", "function": {"name": "read_file"}}
    for choice in ("required", named):
        notes = FieldNotes()
        given = {"messages": HI, "tools": [WEB_SEARCH, FUNCTION], "tool_choice": choice}
        body = ChatCompletionRequest.model_validate(given, context=notes)
        assert body.tool_set is not None and body.tool_set.is_forced
        assert body.tool_set.names == ["read_file"]
        assert list(notes.ignored) == ["tools[0].type=web_search"]


def test_unknown_fields_of_a_schema_in_response_format_are_named() -> None:
    schema = {"name": "a", "description": "d", "schema": {"type": "integer", "x": 1}, "y": 2}
    notes = FieldNotes()
    given = {"messages": HI, "response_format": {"type": "json_schema", "json_schema": schema}}
    body = ChatCompletionRequest.model_validate(given, context=notes)
    assert json.loads(body.response_format.json) == schema["schema"]
    assert list(notes.ignored) == ["response_format.json_schema.y"]
    with naming(ValidationError, "response_format.json_schema.y"):
        ChatCompletionRequest.model_validate(given, context=FieldNotes(strict=True))


# ---- notices -------------------------------------------------------------------------------------


def counted(client: httpx.Client) -> dict[tuple[str, str], float]:
    """(route, kind) -> value of the metric."""
    pattern = r'^llaisys:ignored_fields_total\{kind="(\w+)",route="([^"]+)"\} (\S+)$'
    found = re.findall(pattern, client.get("/metrics").text, re.M)
    return {(route, kind): float(value) for kind, route, value in found}


def test_ignored_fields_are_counted_by_route_and_kind(client: httpx.Client) -> None:
    before = counted(client)
    body = {
        **BODIES[CHAT],
        "messages": [{**HI[0], "x": 1}] * 9,  # one name: counted once
        "frobnicate": 1,
        "store": True,
        "enable_thinking": True,
        "tools": [WEB_SEARCH],
    }
    assert client.post(CHAT, json=body).status_code == 200
    after = counted(client)
    grown = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key)}
    kinds = {"unknown": 2.0, "hint": 1.0, "tool": 1.0, "reasoning": 1.0}
    assert grown == {(CHAT, kind): count for kind, count in kinds.items()}


def test_field_names_are_not_metric_labels(client: httpx.Client) -> None:
    client.post(CHAT, json={**BODIES[CHAT], "a_name_of_its_own": 1})
    assert "a_name_of_its_own" not in client.get("/metrics").text


def test_debug_log_names_ignored_fields_once(client: httpx.Client, server: ServerProcess) -> None:
    headers = {"X-Request-Id": "ignored-1"}
    body = {**BODIES[CHAT], "frobnicate": "secret text", "my\nkey": 1, "store": True}
    client.post(CHAT, json=body, headers=headers)

    def found() -> list[dict[str, Any]]:
        events = [e for e in server.events() if e.get("request_id") == "ignored-1"]
        return [event for event in events if event["message"] == "ignored fields"]

    server.wait_for(lambda: bool(found()), "the line")
    (event,) = found()
    assert event["fields"] == "frobnicate, store" and event["count"] == 3
    assert event["level"].lower() == "debug"
    assert not any("secret text" in line or "my\\nkey" in line for line in server.log)


def test_header_names_a_bounded_number_of_fields(client: httpx.Client) -> None:
    body = {**BODIES[CHAT], **{f"x{number}": 1 for number in range(60)}, "y" * 200: 1}
    assert len(names(client.post(CHAT, json=body))) == 32
    many = {**BODIES[CHAT], **{f"x{number}": 1 for number in range(200)}}
    assert "it must have at most 128" in message_of(client.post(CHAT, json=many))


def test_header_names_max_tokens_that_the_context_caps(client: httpx.Client) -> None:
    length = client.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"prompt": [104, 105], "max_tokens": length, "stop": ["e"], "temperature": 0}
    assert names(client.post("/v1/completions", json=body)) == {f"max_tokens={length - 2}"}
    assert not names(client.post("/v1/completions", json={**body, "max_tokens": 8}))


# ---- a model without reasoning -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
        (CHAT, {"reasoning_effort": "none"}, "reasoning_effort"),
        (CHAT, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (CHAT, {"reasoning": {"enabled": True}}, "reasoning.enabled"),
        (CHAT, {"reasoning": {"max_tokens": 100}}, "reasoning.max_tokens"),
        (CHAT, {"enable_thinking": False}, "enable_thinking"),
        (CHAT, {"thinking": True}, "thinking"),
        (CHAT, {"thinking": {"type": "disabled"}}, "thinking"),
        (CHAT, {"thinking_budget": 100}, "thinking_budget"),
        (CHAT, {"thinking_budget_tokens": 100}, "thinking_budget"),
        (COMPLETIONS, {"thinking_budget": 100}, "thinking_budget"),
        (COMPLETIONS, {"reasoning_effort": "low"}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
        (MESSAGES, {"thinking": {"type": "disabled"}}, "thinking"),
        ("/api/chat", {"think": False}, "think"),
        ("/api/chat", {"think": "high"}, "think"),
    ],
)
def test_reasoning_fields_have_no_effect_and_are_named(
    client: httpx.Client, path: str, fields: dict[str, Any], ignored: str
) -> None:
    response = client.post(path, json={**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    assert names(response) == {ignored}


# ---- what clients look for in an error -----------------------------------------------------------


@pytest.mark.parametrize("size", [5000, 500_000])
def test_context_overflow_states_the_maximum_length(client: httpx.Client, size: int) -> None:
    for path in (CHAT, MESSAGES, RESPONSES):
        content = {"input": "x" * size} if path == RESPONSES else {
            "messages": [{"role": "user", "content": "x" * size}]}  # fmt: skip
        text = message_of(client.post(path, json={**BODIES[path], **content}))
        assert "this model's maximum context length is 2048 tokens" in text
