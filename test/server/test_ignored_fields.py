"""Requests as clients send them: unknown fields and built-in tools are ignored and named in every
protocol, refused in strict mode; bad values of known fields and media stay errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from server_helpers import ServerProcess

from llaisys.server.openai.fields import FieldNotes
from llaisys.server.openai.schemas import ChatCompletionRequest

IGNORED = "x-llaisys-ignored-fields"
STRICT = {"x-llaisys-strict-fields": "true"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
READ_FILE = {
    "name": "read_file",
    "description": "Read a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
FUNCTION = {"type": "function", "function": READ_FILE}
EPHEMERAL = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--no-ui", "--log-level", "debug", "--served-model-name", "fake") as process:
        yield process.wait_ready()


def names(response: httpx.Response) -> set[str]:
    found = response.headers.get(IGNORED, "")
    return set(found.split(", ")) if found else set()


def message_of(response: httpx.Response) -> str:
    """The text of an error in any protocol."""
    error = response.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


# ---- the requests of real clients ----------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A request of a client, and the fields of it that have no effect here."""

    path: str
    body: dict[str, Any]
    ignored: set[str] = field(default_factory=set)


SHAPES = {
    "Codex CLI": Shape(
        RESPONSES,
        {
            "model": "fake",
            "instructions": "You are Codex.",
            "input": [
                {
                    "type": "message",
                    "role": "developer",
                    "content": [{"type": "input_text", "text": "<permissions>"}],
                    "internal_metadata": {"turn": 1},
                },
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "hi"}],
                },
            ],
            "tools": [
                {"type": "function", **READ_FILE, "strict": False, "output_schema": None},
                {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
                {
                    "type": "namespace",
                    "name": "mcp__docs__",
                    "description": "Docs.",
                    "tools": [{"type": "function", **READ_FILE}],
                },
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0198-thread",
            "text": {"verbosity": "medium"},
            "client_metadata": {"x-codex-installation-id": "0198"},
            "max_output_tokens": 4,
        },
        {
            *("client_metadata", "input[].internal_metadata", "reasoning.effort"),
            *("tools[].output_schema", "tools[1].type=custom", "tools[2].type=namespace"),
            "tools[3].type=web_search",
        },
    ),
    "Claude Code": Shape(
        f"{MESSAGES}?beta=true",
        {
            "model": "fake",
            "max_tokens": 1000,
            "stream": True,
            "system": [{"type": "text", "text": "You are Claude.", "cache_control": EPHEMERAL}],
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "hi", "cache_control": EPHEMERAL}],
                }
            ],
            "tools": [
                {"name": "Read", "description": "Read.", "input_schema": {"type": "object"}},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
                {"type": "computer_20250124", "name": "computer", "display_width_px": 1024},
            ],
            "metadata": {"user_id": "user_1", "session": "s"},
            "thinking": {"type": "enabled", "budget_tokens": 31999},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "betas": ["x"],
        },
        {
            *("context_management", "betas", "metadata.session", "thinking.budget_tokens"),
            *("output_config.effort", "tools[1].type=web_search_20250305"),
            "tools[2].type=computer_20250124",
        },
    ),
    "guidance": Shape(
        CHAT,
        {
            "model": "fake",
            "messages": HI,
            "max_tokens": 4,
            "logprobs": True,
            "top_logprobs": 5,
            "guided_decoding_backend": "guidance",
        },
        {"guided_decoding_backend"},
    ),
    "Continue": Shape(
        CHAT,
        {
            "model": "fake",
            "messages": HI,
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "reasoning": None,
            "prediction": None,
            "top_k": None,
        },
    ),
    "LibreChat": Shape(
        CHAT,
        {
            "model": "fake",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_tokens": 4,
            "user": "66b1",
            "stream": True,
            "streaming": True,
            "promptPrefix": None,
            "modelLabel": "Nova",
            "resendFiles": True,
            "imageDetail": "auto",
            "include_reasoning": True,
        },
        {"streaming", "promptPrefix", "modelLabel", "resendFiles", "imageDetail"},
    ),
    "SillyTavern chat": Shape(
        CHAT,
        {
            "model": "fake",
            "messages": [{"role": "user", "content": "hi", "identifier": "chat-0"}],
            "max_tokens": 4,
            "temperature": 1,
            "top_p": 1,
            "top_a": 0,
            "stream": False,
            "stop": [],
            "logit_bias": {},
            "reasoning_effort": "medium",
            "enable_web_search": False,
            "request_images": False,
            "custom_prompt_post_processing": "",
            "char_name": "Nova",
            "group_names": [],
        },
        {
            *("top_a", "enable_web_search", "request_images", "custom_prompt_post_processing"),
            *("char_name", "group_names", "messages[].identifier", "reasoning_effort"),
        },
    ),
    "SillyTavern text": Shape(
        COMPLETIONS,
        {
            "model": "fake",
            "prompt": "hi",
            "max_tokens": 4,
            "max_new_tokens": 4,
            "n_predict": 4,
            "temperature": 1,
            "typical_p": 1,
            "sampler_seed": -1,
            "seed": -1,
            "min_p": 0.1,
            "repetition_penalty": 1,
            "repetition_penalty_range": 0,
            "tfs": 1,
            "epsilon_cutoff": 0,
            "mirostat": 0,
            "mirostat_mode": 0,
            "mirostat_tau": 5,
            "dry_multiplier": 0,
            "dry_sequence_breakers": '["\\n"]',
            "guidance_scale": 1,
            "negative_prompt": "",
            "ban_eos_token": False,
            "custom_token_bans": "",
            "banned_strings": [],
            "include_reasoning": True,
            "best_of": 1,
            "length_penalty": 1.2,
            "api_type": "vllm",
            "api_server": "http://localhost:8000",
        },
        {
            *("max_new_tokens", "sampler_seed", "repetition_penalty_range", "tfs"),
            *("epsilon_cutoff", "guidance_scale", "negative_prompt", "ban_eos_token"),
            *("custom_token_bans", "banned_strings", "api_type", "api_server"),
        },
    ),
    "GitHub Copilot chat": Shape(
        CHAT,
        {
            "model": "fake",
            "messages": [
                {"role": "system", "content": "You.", "copilot_cache_control": EPHEMERAL},
                {"role": "user", "content": "hi"},
            ],
            "tools": [{**FUNCTION, "copilot_cache_control": EPHEMERAL}],
            "tool_choice": "auto",
            "max_tokens": 4,
            "temperature": 0.1,
            "top_p": 1,
            "n": 1,
            "stream": True,
            "snippy": {"enabled": False},
            "intent": False,
            "thinking_budget": 4000,
        },
        {
            *("messages[].copilot_cache_control", "tools[].copilot_cache_control", "snippy"),
            *("intent", "thinking_budget"),
        },
    ),
    "GitHub Copilot completion": Shape(
        COMPLETIONS,
        {
            "prompt": "def f(",
            "max_tokens": 4,
            "n": 1,
            "stop": ["\n"],
            "stream": True,
            "nwo": "a/b",
            "extra": {"language": "python", "next_indent": 0, "trim_by_indentation": True},
            "code_annotations": False,
        },
        {"nwo", "extra", "code_annotations"},
    ),
    "OpenRouter": Shape(
        CHAT,
        {
            "model": "fake",
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "content": "hello",
                    "refusal": None,
                    "reasoning_details": [{"type": "reasoning.text", "text": "x"}],
                },
                *HI,
            ],
            "max_tokens": 4,
            "models": ["a/b", "c/d"],
            "provider": {"order": ["x"], "allow_fallbacks": True},
            "plugins": [{"id": "web", "max_results": 3}],
            "usage": {"include": True},
            "transforms": ["middle-out"],
            "reasoning": {"effort": "high", "exclude": False, "max_price": 1},
            "web_search_options": {"search_context_size": "low"},
            "response_format": {"type": "text", "y": None},
        },
        {
            *("models", "provider", "plugins", "usage", "transforms", "reasoning.effort"),
            *("reasoning.max_price", "messages[].reasoning_details", "web_search_options"),
            "response_format.y",
        },
    ),
    "OpenAI Agents SDK": Shape(
        RESPONSES,
        {
            "model": "fake",
            "input": [
                {"type": "web_search_call", "id": "ws_1", "status": "completed"},
                {
                    "id": "msg_1",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [
                        {"type": "output_text", "text": "x", "annotations": [], "hint": 1}
                    ],
                },
                {"role": "user", "content": "hi"},
            ],
            "tools": [
                {"type": "code_interpreter", "container": {"type": "auto"}},
                {"type": "file_search", "vector_store_ids": ["v"]},
            ],
            "tool_choice": "auto",
            "include": ["web_search_call.action.sources"],
            "max_output_tokens": 4,
            "conversation": None,
            "stream_options": {"include_obfuscation": True, "more": 1},
            "stream": True,
        },
        {
            *("input[].type=web_search_call", "input[].content[].hint", "include[0]"),
            *("tools[0].type=code_interpreter", "tools[1].type=file_search"),
            "stream_options.more",
        },
    ),
    "Anthropic SDK history": Shape(
        f"{MESSAGES}/count_tokens",
        {
            "model": "fake",
            "mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}],
            "system": [{"type": "text", "text": "s", "index": 1}],
            "tool_choice": {"type": "auto", "reason": "x"},
            "tools": [{"name": "f", "input_schema": {}, "defer_loading": True, "version": 2}],
            "messages": [
                {"role": "user", "content": "hi", "id": "m"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                        {"type": "text", "text": "x", "index": 0},
                    ],
                },
                *HI,
            ],
        },
        {
            *("mcp_servers", "system[].index", "tool_choice.reason", "tools[].defer_loading"),
            *("tools[].version", "messages[].id", "messages[].content[].index"),
            "messages[].content[].type=server_tool_use",
            "messages[].content[].type=web_search_tool_result",
        },
    ),
    "Ollama chat": Shape(
        "/api/chat",
        {
            "model": "fake",
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "f", "arguments": {}, "x": 1}, "y": 2}],
                },
                {"role": "tool", "tool_name": "f", "content": "1", "when": 5},
            ],
            "tools": [{**FUNCTION, "x": None}, {"type": "web_search"}],
            "stream": False,
            "think": True,
            "options": {"num_predict": 4, "num_ctx": 8192, "cache_type": "q8", "top_k": None},
            "chat_id": "c",
            "frobnicate": None,
        },
        {
            *("think", "options.num_ctx", "options.cache_type", "chat_id", "frobnicate"),
            *("messages[].when", "messages[].tool_calls[].y", "tools[].x"),
            *("messages[].tool_calls[].function.x", "tools[1].type=web_search"),
        },
    ),
    "Ollama generate": Shape(
        "/api/generate",
        {"model": "fake", "prompt": "hi", "stream": False, "options": {"num_predict": 4}, "w": 1},
        {"w"},
    ),
    "Ollama embed": Shape(
        "/api/embed", {"model": "fake", "input": "hi", "options": {"num_ctx": 1}, "x": 1},
        {"options.num_ctx", "x"},
    ),
    "llama.cpp": Shape(
        "/completion",
        {"prompt": "hi", "n_predict": 4, "id_slot": 0, "cache_prompt": True, "x": None},
        {"x"},
    ),
    "llama.cpp template": Shape(
        "/apply-template",
        {"messages": HI, "reasoning_format": "auto", "tools": [{"type": "web_search"}]},
        {"reasoning_format", "tools[0].type=web_search"},
    ),
    "embeddings": Shape(
        "/v1/embeddings",
        {"model": "fake", "input": "hi", "input_type": "query", "task": None, "truncate": "END"},
        {"input_type", "task", "truncate"},
    ),
    "score": Shape("/v1/score", {"text_1": "a", "text_2": "b", "x": 1}, {"x"}),
    "rerank": Shape(
        "/v1/rerank",
        {"query": "a", "documents": [{"text": "b", "id": 7}], "max_chunks_per_doc": 1},
        {"documents[].id", "max_chunks_per_doc"},
    ),
    "tokenize": Shape("/tokenize", {"prompt": "hi", "x": 1}, {"x"}),
    "detokenize": Shape("/detokenize", {"tokens": [104, 105], "x": 1}, {"x"}),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_client_requests_are_answered_and_ignored_fields_named(
    client: httpx.Client, shape: Shape
) -> None:
    response = client.post(shape.path, json=shape.body)
    assert response.status_code == 200, response.text
    assert names(response) == shape.ignored


# Without effect on this model, which does not reason; named in strict mode, too, and not refused.
SOFT = re.compile(r"reasoning(_|\.)effort|output_config\.effort|think")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_strict_mode_rejects_ignored_fields(client: httpx.Client, shape: Shape) -> None:
    response = client.post(shape.path, json=shape.body, headers=STRICT)
    hard = {name for name in shape.ignored if not SOFT.fullmatch(name)}
    own = {"options.num_ctx"}  # names that the protocol has, without effect
    assert response.status_code == (400 if hard - own else 200), response.text


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
    with pytest.raises(ValidationError, match=r"unknown field 'response_format.json_schema.y'"):
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
