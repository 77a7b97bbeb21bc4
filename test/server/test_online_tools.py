"""Tools and reasoning over HTTP: a real server, real templates, a scripted model.

The model has Qwen's tokens and template (`think_first`: that of DeepSeek-R1-Distill, which opens
the reasoning and has no tools)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from chat_templates import R1_DISTILL
from http_helpers import CHAT, error_of
from scripted_server import scripted_server
from server_helpers import ServerProcess
from wire_helpers import sse_events

ARGUMENTS = '{"city": "Paris", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
PARIS, PISA = (CALL.replace(ARGUMENTS, f'{{"city": "{city}"}}') for city in ("Paris", "Pisa"))
THOUGHT = "They want the weather."
RULES = [
    {"when": ["<tool_response>\nsunny"], "say": "It is sunny."},
    {"when": ["TWO"], "say": f"I look.\n{CALL}\n{CALL}"},
    {"when": ["LOOP"], "say": "\n".join([PARIS, PISA, PARIS, PISA] * 4)},
    {"when": ["YES"], "say": '{"ok": true}'},
    {"when": ["BROKEN"], "say": '<tool_call>\n{"name": weather}\n</tool_call>'},
    {"when": ["CUT"], "say": f"{CALL}"},
    {"when": ["BOTH"], "say": f"<think>\n{THOUGHT}\n</think>\n\nSo.\n{CALL}"},
    {"when": ["BARE"], "say": f'{{"name": "weather", "parameters": {ARGUMENTS}}}'},
    {"when": ["LONG"], "say": "<think>\n" + "hm " * 100 + "</think>\n\nYes."},
    {"when": ["THINK"], "say": "<think>\nOne, two.\n</think>\n\nThree."},
    {"when": ["weather"], "say": CALL},
    {"when": [], "say": "Hello."},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with scripted_server(tmp_path_factory.mktemp("qwen"), rules=RULES) as process:
        yield process


@pytest.fixture(scope="module")
def think_first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("r1")
    with (
        scripted_server(folder, rules=RULES, template=R1_DISTILL) as process,
        process.client() as client,
    ):
        yield client


@pytest.fixture(scope="module")
def sdk(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(text: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 400, "temperature": 0}
    return {**body, **fields}


def answer(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def chunks(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        *events, done = list(sse_events(response))
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def deltas(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks(client, body)]


def joined(parts: list[dict[str, Any]], name: str) -> str:
    return "".join(part.get(name) or "" for part in parts)


# ---- calls ---------------------------------------------------------------------------------------


def test_tool_call_and_result(client: httpx.Client) -> None:
    body = ask("What is the weather?", tools=[WEATHER], tool_choice="auto")
    choice = answer(client, body)
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    body["messages"] += [message, result]
    choice = answer(client, body)
    assert choice["message"] == {"role": "assistant", "content": "It is sunny.", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_streamed_tool_calls_match_openai(client: httpx.Client) -> None:
    parts = deltas(client, ask("TWO weather", tools=[WEATHER]))
    assert parts[0] == {"role": "assistant", "content": None}
    assert joined(parts, "content") == "I look."
    calls = [call for part in parts for call in part.get("tool_calls", ())]
    firsts = [call for call in calls if "id" in call]
    assert [call["index"] for call in firsts] == [0, 1]
    for call in firsts:
        assert set(call) == {"index", "id", "type", "function"}
        assert call["function"] == {"name": "weather", "arguments": ""}
    for index in (0, 1):
        pieces = [c for c in calls if c["index"] == index and "id" not in c]
        assert all(set(piece) == {"index", "function"} for piece in pieces) and pieces
        assert "".join(piece["function"]["arguments"] for piece in pieces) == ARGUMENTS
    assert parts[-1] == {}
    last = chunks(client, ask("TWO weather", tools=[WEATHER]))[-1]["choices"][0]
    assert last["finish_reason"] == "tool_calls"


def test_parallel_tool_calls_false_allows_one_call(client: httpx.Client) -> None:
    body = ask("TWO weather", tools=[WEATHER], parallel_tool_calls=False)
    assert len(answer(client, body)["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("n", [1, 2])
def test_required_answer_ends_at_a_repeated_call(client: httpx.Client, n: int) -> None:
    body = ask("LOOP", tools=[WEATHER], tool_choice="required", max_tokens=2000, n=n)
    response = client.post(CHAT, json=body).json()
    for choice in response["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        calls = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        assert calls == ['{"city": "Paris"}', '{"city": "Pisa"}']
    # The third call is generated and dropped; nothing follows it.
    assert response["usage"]["completion_tokens"] < n * 3 * len(PARIS)
    events = chunks(client, {**body, "n": 1})
    parts = [call for e in events for call in e["choices"][0]["delta"].get("tool_calls", ())]
    assert [part["index"] for part in parts if "id" in part] == [0, 1]
    assert "".join(p["function"]["arguments"] for p in parts if p["index"] == 1) == calls[1]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_required_single_call(client: httpx.Client) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 2000}
    choice = answer(client, ask("LOOP", tools=[WEATHER], **fields))
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"


def test_auto_choice_keeps_repeated_calls(client: httpx.Client) -> None:
    choice = answer(client, ask("TWO weather", tools=[WEATHER]))
    assert len(choice["message"]["tool_calls"]) == 2


def test_tool_choice_none(client: httpx.Client) -> None:
    for fields in ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}, {}):
        choice = answer(client, ask("BARE", **fields))
        assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
        assert choice["message"]["content"].startswith('{"name"')
    assert answer(client, ask("hello", tools=[], tool_choice="auto"))["message"]["content"]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_forced_call_is_made(client: httpx.Client, choice: Any, stream: bool) -> None:
    """The script says hello, but the grammar forces a call by masking its tokens."""
    strict = {"type": "object", "properties": {"days": {"type": "boolean"}}, "required": ["days"]}
    strict["additionalProperties"] = False
    function = {"name": "weather", "parameters": strict, "strict": True}
    body = ask("hello", tools=[{"type": "function", "function": function}], tool_choice=choice)
    if stream:
        parts = [call for part in deltas(client, body) for call in part.get("tool_calls", ())]
        arguments = "".join(part["function"]["arguments"] for part in parts if part["index"] == 0)
    else:
        arguments = answer(client, body)["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments).keys() == {"days"}


def test_forced_call_excludes_other_constraints(client: httpx.Client) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "required"}
    body = ask("weather", **fields, structured_outputs={"regex": "[a-z]+"})
    assert error_of(client.post(CHAT, json=body), 400)["param"] == "tool_choice"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_beside_a_response_format(client: httpx.Client, choice: str) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "days": {}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    fields = {"tools": [tool], "tool_choice": choice, "response_format": format_}
    called = answer(client, ask("weather", **fields))
    (call,) = called["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] == "Paris"
    if choice == "auto":
        text = answer(client, ask("YES weather", **fields))["message"]["content"]
        assert json.loads(text) == {"ok": True}


def test_malformed_call_is_text(client: httpx.Client) -> None:
    choice = answer(client, ask("BROKEN", tools=[WEATHER]))
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == '<tool_call>\n{"name": weather}\n</tool_call>'


def test_truncated_call_has_finish_reason_length(client: httpx.Client) -> None:
    choice = answer(client, ask("CUT weather", tools=[WEATHER], max_tokens=60))
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    assert ARGUMENTS.startswith(call["function"]["arguments"]) and call["function"]["arguments"]


def test_choices_logprobs_and_calls(client: httpx.Client) -> None:
    body = ask("BOTH weather", tools=[WEATHER], n=3, logprobs=True, top_logprobs=1)
    whole = client.post(CHAT, json=body).json()
    messages = [choice["message"] for choice in whole["choices"]]
    assert len({message["tool_calls"][0]["id"] for message in messages}) == 3
    for message in messages:
        assert message["reasoning_content"] == message["reasoning"] == THOUGHT
        assert message["content"] == "So."
    count = len(whole["choices"][0]["logprobs"]["content"])
    for index in range(3):
        found = [c["choices"][0] for c in chunks(client, body) if c["choices"][0]["index"] == index]
        entries = [e for c in found for e in (c["logprobs"] or {"content": []})["content"]]
        assert len(entries) == count
        parts = [c["delta"] for c in found]
        assert joined(parts, "reasoning_content") == joined(parts, "reasoning") == THOUGHT
        assert joined(parts, "content") == "So."


def test_stop_strings_apply_in_reasoning_and_calls(client: httpx.Client) -> None:
    choice = answer(client, ask("BOTH weather", tools=[WEATHER], stop="want"))
    assert choice["message"]["reasoning_content"] == "They"
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "want"


def test_session_stores_calls_results_and_reasoning(client: httpx.Client) -> None:
    fields = {"tools": [WEATHER], "session_id": "tools-1"}
    choice = answer(client, ask("BOTH weather", **fields))
    call = choice["message"]["tool_calls"][0]
    body = ask("", **fields)
    body["messages"] = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    assert answer(client, body)["message"]["content"] == "It is sunny."
    kept = client.get("/v1/sessions/tools-1").json()["messages"]
    assert [message["role"] for message in kept] == ["user", "assistant", "tool", "assistant"]
    assert kept[1]["tool_calls"] == [call] and kept[1]["reasoning_content"] == THOUGHT
    made = client.post("/v1/sessions", json={"session_id": "tools-2", "messages": kept})
    assert made.status_code == 201 and made.json()["messages"] == kept


def test_replayed_messages_are_accepted(client: httpx.Client) -> None:
    """Empty lists and strings, arguments as objects, indices of deltas, missing ids."""
    call = {"index": 0, "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    body = ask("weather", tools=[WEATHER])
    body["messages"] += [
        {"role": "assistant", "content": "a", "tool_calls": [], "reasoning_content": ""},
        {"role": "assistant", "content": "", "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "user", "content": "so?"},
    ]
    assert answer(client, body)["message"]["content"] == "It is sunny."


def test_tokenize_prompt_with_tools(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "weather"}]}
    without = client.post("/tokenize", json=body).json()["count"]
    assert (
        client.post("/tokenize", json={**body, "tools": [WEATHER]}).json()["count"] > without + 50
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": 7}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 7}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": "weather"}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "weather"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"thinking_budget": -1}, "thinking_budget"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_what_is_wrong_is_named(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert error_of(client.post(CHAT, json=ask("hi", **fields)), 400)["param"] == param


# ---- reasoning -----------------------------------------------------------------------------------


def test_reasoning_is_separate_from_content(client: httpx.Client) -> None:
    response = client.post(CHAT, json=ask("THINK")).json()
    message = response["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "One, two."
    assert message["content"] == "Three."
    details = response["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len("\nOne, two.\n")}  # a token is a byte
    parts = chunks(client, ask("THINK", stream_options={"include_usage": True}))
    assert parts[-1]["usage"]["completion_tokens_details"] == details
    streamed = [part["choices"][0]["delta"] for part in parts[:-1]]
    assert (
        joined(streamed, "reasoning_content") == "One, two."
        and joined(streamed, "content") == "Three."
    )


def test_include_reasoning_false(client: httpx.Client) -> None:
    for fields in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        message = answer(client, ask("THINK", **fields))["message"]
        assert "reasoning_content" not in message and message["content"] == "Three."


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"reasoning_effort": "none", "enable_thinking": True},  # the effort comes first
    ],
)
def test_template_disables_reasoning(client: httpx.Client, fields: dict[str, Any]) -> None:
    ids = client.post(CHAT, json=ask("hello", **fields)).json()["usage"]["prompt_tokens"]
    plain = client.post(CHAT, json=ask("hello")).json()["usage"]["prompt_tokens"]
    assert ids == plain + len("<\n\n>\n\n")  # each marker is one token


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_budget": 21},
        {"thinking_token_budget": 21},
        {"thinking_budget_tokens": 21},
        {"reasoning": {"max_tokens": 21}},
        {"thinking": {"type": "enabled", "budget_tokens": 21}},
    ],
)
def test_thinking_budget_ends_reasoning(client: httpx.Client, fields: dict[str, Any]) -> None:
    response = client.post(CHAT, json=ask("LONG", **fields)).json()
    message = response["choices"][0]["message"]
    assert message["reasoning_content"] == ("hm " * 7)[:20].strip()  # after a line break
    assert message["content"].startswith("hm hm")  # the script goes on
    assert response["usage"]["completion_tokens_details"]["reasoning_tokens"] == 21


def test_template_that_opens_reasoning(think_first: httpx.Client) -> None:
    message = answer(think_first, ask("THINK"))["message"]
    assert (message["reasoning_content"], message["content"]) == ("One, two.", "Three.")
    streamed = deltas(think_first, ask("THINK"))
    assert (
        joined(streamed, "reasoning_content") == "One, two."
        and joined(streamed, "content") == "Three."
    )


def test_reasoning_effort_none_sets_budget_zero(think_first: httpx.Client) -> None:
    response = think_first.post(CHAT, json=ask("LONG", reasoning_effort="none"))
    assert "reasoning_content" not in response.json()["choices"][0]["message"]
    assert response.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    hinted = think_first.post(CHAT, json=ask("THINK", reasoning_effort="low"))
    assert hinted.headers["x-llaisys-ignored-fields"] == "reasoning_effort"


def test_tools_work_with_a_template_without_tools(think_first: httpx.Client) -> None:
    """Calls and results are text in the prompt, and bare JSON is a call."""
    body = ask("BOTH weather", tools=[WEATHER])
    message = answer(think_first, body)["message"]
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS}
    call = message["tool_calls"][0]
    body["messages"] += [message, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    usage = think_first.post(CHAT, json=body).json()
    assert usage["choices"][0]["finish_reason"] == "stop"


# ---- the client that most users have -------------------------------------------------------------


def test_openai_client_calls_tools(sdk: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "the weather?"}]
    tools: list[Any] = [WEATHER]
    found = sdk.chat.completions.create(model="scripted", messages=messages, tools=tools)
    calls = found.choices[0].message.tool_calls
    assert calls is not None and calls[0].function.name == "weather"
    messages += [found.choices[0].message]
    messages += [{"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"}]
    found = sdk.chat.completions.create(model="scripted", messages=messages, tools=tools)
    assert found.choices[0].message.content == "It is sunny."


def test_openai_client_streams_tools(sdk: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "BOTH weather"}]
    tools: list[Any] = [WEATHER]
    with sdk.chat.completions.stream(model="scripted", messages=messages, tools=tools) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert message.content == "So." and message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == ARGUMENTS


# ---- legacy functions and allowed tools ----------------------------------------------------------


def test_legacy_functions(client: httpx.Client) -> None:
    body = ask("What is the weather?", functions=[WEATHER["function"]], function_call="auto")
    choice = answer(client, body)
    assert choice["finish_reason"] == "function_call"
    message = choice["message"]
    assert "tool_calls" not in message and message["content"] is None
    assert message["function_call"] == {"name": "weather", "arguments": ARGUMENTS}
    parts = deltas(client, body)
    calls = [part["function_call"] for part in parts if "function_call" in part]
    assert calls[0]["name"] == "weather" and not any("tool_calls" in part for part in parts)
    assert "".join(call["arguments"] for call in calls) == ARGUMENTS
    body["messages"] += [message, {"role": "function", "name": "weather", "content": "sunny"}]
    assert answer(client, body)["message"]["content"] == "It is sunny."


def test_legacy_function_choice(client: httpx.Client) -> None:
    functions = [WEATHER["function"], {"name": "other"}]
    none = answer(client, ask("hello", functions=functions, function_call="none"))
    assert none["message"]["content"] == "Hello."
    body = ask("hello", functions=functions, function_call={"name": "weather"})
    assert answer(client, body)["message"]["function_call"]["name"] == "weather"
    body = ask("hello", functions=functions, tools=[WEATHER])
    assert error_of(client.post(CHAT, json=body), 400)["param"] == "functions"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_limit_the_tools(client: httpx.Client, mode: str) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    allowed = {"type": "function", "function": {"name": "weather"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [allowed]}}
    body = ask("hello", tools=[WEATHER, other], tool_choice=choice, verbose=True, max_tokens=200)
    response = client.post(CHAT, json=body).json()
    assert '"other"' not in response["__verbose"]["prompt"]
    calls = response["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"weather"}
    choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "none"}}]
    error_of(client.post(CHAT, json=body), 400)
