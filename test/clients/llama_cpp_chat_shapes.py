"""`llama_cpp_shapes` of the chat tests: OpenAI's API, keys, tools, and other APIs."""

from __future__ import annotations

import json
from typing import Any

import httpx
from llama_cpp_shapes import (
    ALIAS,
    BATCH,
    BOOK,
    CONTEXT,
    FIXED,
    LIFE,
    ORIGIN,
    complete,
    post,
    shape,
    streamed,
)

CHAT = "/chat/completions"
HI = [{"role": "user", "content": "test"}]


def chat(client: httpx.Client, status: int = 200, **fields: Any) -> Any:
    return post(client, CHAT, status, **{"messages": BOOK, "max_tokens": 8, **FIXED, **fields})


# ---- test_chat_completion ------------------------------------------------------------------------


@shape("chat_completion", 11)  # ten of texts, parts, templates and names, and one through openai
def chat_completion(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the best book"}]
    for fields in ({"model": None}, {"model": ALIAS}, {}):
        for content in ("Hey", parts):
            messages = [BOOK[0], {"role": "user", "content": content}]
            body = chat(client, messages=messages, **fields)
            assert "cmpl" in body["id"] and body["system_fingerprint"].startswith("b")
            assert body["usage"]["completion_tokens"] == 8
            (choice,) = body["choices"]
            assert choice["message"]["role"] == "assistant"
            assert type(choice["message"]["content"]) is str
            assert choice["finish_reason"] == "length"


@shape("chat_completion", 2)
def chat_stream(client: httpx.Client) -> None:
    first, *parts, last = streamed(client, CHAT, messages=BOOK, max_tokens=8, **FIXED)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    for part in (*parts, last):
        assert "role" not in part["choices"][0]["delta"] and part["id"] == first["id"]
        assert part["model"] == ALIAS and part["system_fingerprint"].startswith("b")
    assert last["choices"][0]["finish_reason"] == "length"
    assert "content" not in last["choices"][0]["delta"]


@shape("chat_completion")
def applied_template(client: httpx.Client) -> None:
    prompt = post(client, "/apply-template", messages=BOOK)["prompt"]
    assert prompt == (
        "<|im_start|>system\nBook<|im_end|>\n<|im_start|>user\nWhat is the best book<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@shape("chat_completion", 12)  # eight formats, two schemas, two grammars
def formats(client: httpx.Client) -> None:
    schema = {"const": "42"}
    for fields, content in (
        ({"response_format": {"type": "json_object", "schema": schema}}, '"42"'),
        ({"json_schema": schema}, '"42"'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
            '"42"',
        ),
        ({"grammar": 'root ::= "a"{5,5}'}, "aaaaa"),
    ):
        assert chat(client, **fields)["choices"][0]["message"]["content"] == content
    begun = chat(client, response_format={"type": "json_object"})["choices"][0]["message"]
    assert begun["content"].lstrip().startswith("{")
    items = {"items": [{"type": "integer"}]}
    chat(client, response_format={"type": "json_object", "schema": items})
    for wrong in (
        {"type": "sound"},
        {"type": "json_object", "schema": 123},
        {"type": "json_object", "schema": {"type": 123}},
        {"type": "json_object", "schema": {"type": "hiccup"}},
    ):
        assert chat(client, 400, response_format=wrong)["error"]


@shape("chat_completion", 7)
def no_messages(client: httpx.Client) -> None:
    for wrong in (None, "string", [123], [{}], [{"role": 123}],
                  [{"role": "system", "content": 123}], [BOOK[0], {}]):  # fmt: skip
        assert chat(client, 400, messages=wrong)["error"]


@shape("chat_completion")
def timings(client: httpx.Client) -> None:
    usage = {"stream_options": {"include_usage": True}, "timings_per_token": True}
    first, *parts = streamed(client, CHAT, messages=HI, max_tokens=10, **usage)
    assert "timings" not in first and parts[-1]["choices"] == []
    found = parts[-1]["timings"]
    assert {"prompt_per_second", "predicted_per_second"} <= set(found)
    assert found["predicted_n"] <= 10


@shape("chat_completion", 2)
def logprobs(client: httpx.Client) -> None:
    fields = {"logprobs": True, "top_logprobs": 10, "logit_bias": {str(n): -100 for n in range(3)}}
    ascii_only = {"allowed_token_ids": [40, 41, 42, 43]}  # bytes that are letters by themselves
    body = chat(client, max_tokens=5, **fields, **ascii_only)["choices"][0]
    parts = streamed(client, CHAT, messages=BOOK, max_tokens=5, **FIXED, **fields, **ascii_only)
    streamed_entries = [
        entry
        for part in parts
        for entry in (part["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    for entries in (body["logprobs"]["content"], streamed_entries):
        assert "".join(entry["token"] for entry in entries) == body["message"]["content"]
        assert all(e["logprob"] <= 0 and e["bytes"] and len(e["top_logprobs"]) for e in entries)


@shape("chat_completion")
def chat_bias(client: httpx.Client) -> None:
    fields = {"return_token_ids": True, "max_tokens": 32}
    (plain,) = chat(client, **fields)["choices"]
    banned = set(plain["token_ids"][:4])
    (other,) = chat(client, **fields, logit_bias={str(t): -100 for t in banned})["choices"]
    assert not banned & set(other["token_ids"])


@shape("chat_completion", 2)
def context_exceeded(client: httpx.Client) -> None:
    for stream in (False, True):
        error = chat(client, 400, messages=BOOK * 100, stream=stream)["error"]
        assert error["type"] == "exceed_context_size_error"
        assert error["n_prompt_tokens"] > CONTEXT == error["n_ctx"]


@shape("chat_completion", 2)
def progress(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "This is a test of progress. " * 10}]

    def progress_events(path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
        parts = streamed(client, path, **fields, **FIXED, return_progress=True)
        found = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
        counts = [entry["processed"] for entry in found]
        assert counts == sorted(set(counts)) and counts[-1] == found[0]["total"]
        assert counts[0] == found[0]["cache"]
        assert len({(entry["total"], entry["cache"]) for entry in found}) == 1
        assert all(entry["time_ms"] >= 0 for entry in found)
        return found

    first = progress_events(messages=messages, max_tokens=10)
    assert first[0]["cache"] == 0
    assert len(first) == 1 + -(-first[0]["total"] // BATCH)
    again = progress_events(messages=messages, max_tokens=10)
    assert again[0]["cache"] > 0 and len(again) < len(first)
    progress_events(
        "/completion", prompt="Another text, as long as a step and a half. " * 3, n_predict=2
    )
    progress_events(
        "/v1/completions", prompt="One that is scored. " * 8, max_tokens=1, echo=True, logprobs=1
    )


@shape("chat_completion")
def choices(client: httpx.Client) -> None:
    assert [choice["index"] for choice in chat(client, n=2)["choices"]] == [0, 1]


# ---- test_tool_call, test_security ---------------------------------------------------------------

TOOL = {
    "type": "function",
    "function": {
        "name": "test",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"success": {"type": "boolean", "const": True}},
            "required": ["success"],
        },
    },
}


@shape("tool_call", 6)
def no_call(client: httpx.Client) -> None:
    for tools, chosen in ((None, None), ([TOOL], None), ([TOOL], "none")):
        fields = {"messages": BOOK, "tools": tools, "tool_choice": chosen, "max_tokens": 16}
        body = post(client, "/v1/chat/completions", **fields, **FIXED)
        assert body["choices"][0]["message"].get("tool_calls") is None
        for part in streamed(client, "/v1/chat/completions", **fields, **FIXED):
            delta = part["choices"][0]["delta"]
            assert delta.get("content") != "" and not delta.get("tool_calls")


@shape("security", 6)  # health, the page and its files, two wrong keys
def without_a_key(client: httpx.Client) -> None:
    bare = httpx.Client(base_url=client.base_url)
    for path in ("/health", "/", "/app.js"):
        assert bare.get(path).status_code == 200
    for headers in ({}, {"Authorization": "Bearer invalid-key"}):
        response = bare.post("/completions", json={"prompt": LIFE}, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"


@shape("security", 3)
def with_a_key(client: httpx.Client) -> None:
    key = client.headers["Authorization"].removeprefix("Bearer ")
    bare = httpx.Client(base_url=client.base_url, headers={"X-Api-Key": key})
    assert "content" in post(bare, "/completions", prompt=LIFE, n_predict=2)
    assert "content" in complete(client)
    assert len(post(bare, CHAT, messages=HI, max_tokens=2)["choices"]) == 1


@shape("security", 2)
def cors(client: httpx.Client) -> None:
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "Authorization"
    response = client.options("/completions", headers=asked)
    assert response.status_code == 200
    assert response.headers["Access-Control-Allow-Origin"] == ORIGIN


# ---- test_compat_oai_responses, test_compat_anthropic --------------------------------------------


@shape("compat_oai_responses", 6)
def responses(client: httpx.Client) -> None:
    asked = {"input": "Write an example", "max_output_tokens": 10, "temperature": 0}
    schema = {"type": "json_schema", "name": "test", "schema": {"const": "foo"}}
    for form in (schema, {"type": "json_object"}, {"type": "text"}):
        body = post(client, "/responses", **asked, text={"format": form})
        assert body["id"].startswith("resp_") and body["output"][0]["id"].startswith("msg_")
    text = {"format": {"type": "json_schema", "name": "test"}}
    assert post(client, "/responses", 400, **asked, text=text)["error"]
    greedy = {"model": ALIAS, "max_output_tokens": 8, "temperature": 0}
    events = streamed(client, "/v1/responses", input=BOOK, **greedy)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created"
    assert {"response.output_item.added", "response.output_text.delta"} <= set(kinds)
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == events[-1]["response"]["output"][0]["content"][0]["text"]


@shape("compat_oai_responses")
def response_timings(client: httpx.Client) -> None:
    fields = {"max_output_tokens": 8, "timings_per_token": True, "return_progress": True}
    events = streamed(client, "/responses", input="This is a test" * 10, **fields)
    progress = [e for e in events if "prompt_progress" in e]
    assert progress and all(e["type"] == "response.in_progress" for e in progress)
    assert all(e["prompt_progress"]["total"] > 0 for e in progress)
    timed = [e for e in events if "timings" in e]
    assert any(e["type"] == "response.output_text.delta" for e in timed)
    rates = {"prompt_per_second", "predicted_per_second"}
    assert all(rates <= e["timings"].keys() for e in timed) and timed[-1] is events[-1]


@shape("chat_completion")
def verbose(client: httpx.Client) -> None:
    asked = {"max_tokens": 2, "messages": BOOK}
    assert "Book" in post(client, "/chat/completions", **asked, verbose=True)["__verbose"]["prompt"]
    assert "__verbose" not in post(client, "/chat/completions", **asked, verbose=False)


CALL = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"location": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "Sunny, 25°C"}


@shape("compat_anthropic", 18)  # plain, with a system text, parts, turns, calls, each parameter
def messages(client: httpx.Client) -> None:
    asked = {"role": "user", "content": "Say hello"}
    parts = {"role": "user", "content": [{"type": "text", "text": text} for text in ("a", "b")]}
    called = [asked, {"role": "assistant", "content": [CALL]}]
    schema = {"type": "object", "properties": {"location": {"type": "string"}}}
    tools = [{"name": "get_weather", "description": "", "input_schema": schema}]
    for messages, fields in (
        ([asked], {"system": "Be brief."}),
        ([parts], {"stop_sequences": ["\n", "END"]}),
        ([asked, {"role": "assistant", "content": "Hi"}, asked], {"temperature": 0.5}),
        ([asked], {"tools": tools, "top_p": 0.9, "top_k": 40}),
        ([asked], {"metadata": {"user_id": "u"}}),
        ([asked], {"thinking": {"type": "enabled", "budget_tokens": 50}}),
        ([*called, {"role": "user", "content": [RESULT]}], {}),
        ([*called, {"role": "user", "content": [{"type": "text", "text": "x"}, RESULT]}], {}),
        ([*called, {"role": "user", "content": [{**RESULT, "is_error": True}]}], {}),
    ):
        body = post(client, "/v1/messages", max_tokens=8, model=ALIAS, messages=messages, **fields)
        assert body["type"] == "message" and body["role"] == "assistant"
        assert "timings" not in body
        used = {"input_tokens", "output_tokens", "cache_read_input_tokens"}
        assert used <= set(body["usage"])
    assert post(client, "/v1/messages", 400, max_tokens=8)["error"]


@shape("compat_anthropic", 5)
def messages_stream_and_counts(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hello world"}]
    events = streamed(client, "/v1/messages", messages=messages, max_tokens=30, model=ALIAS)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert starts == stops == list(range(len(starts)))
    for fields in ({}, {"system": "Be brief."}):
        counted = post(client, "/v1/messages/count_tokens", messages=messages, **fields)
        assert list(counted) == ["input_tokens"] and counted["input_tokens"] > 0
    assert json.dumps(events[0])
