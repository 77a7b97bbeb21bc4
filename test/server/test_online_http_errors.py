"""Errors of the HTTP API name the field and the limit: fields, limits, invalid bodies."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fault_server import UNTOUCHABLE
from http_helpers import CHAT, chat, error_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_helpers import ServerProcess


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", "{{ 7 * 7 }}"),
        ("suffix", "x"),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("modalities", ["text", "audio"]),
    ],
)
def test_unsupported_fields_are_rejected_by_name(
    client: httpx.Client, field: str, value: Any
) -> None:
    error = error_of(client.post(CHAT, json=chat(**{field: value})), 400)
    assert error["param"] == field and field in error["message"]


def test_neutral_values_of_unsupported_fields_pass(client: httpx.Client) -> None:
    body = chat(
        tools=None,
        tool_choice="none",
        response_format={"type": "text"},
        store=False,
        service_tier="auto",
        modalities=["text"],
        best_of=1,
    )
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None}
    body["messages"] = [*body["messages"], message, {"role": "user", "content": "and?"}]
    assert client.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({"n": 129}, "128"),
        ({"n": 0}, "1"),
        ({"n": 1 << 63}, "128"),
        ({"stop": ["x"] * 65}, "64"),
        ({"stop": "x" * 1025}, "1024"),
        ({"top_logprobs": 21, "logprobs": True}, "20"),
        ({"top_logprobs": 2}, "2"),
        ({"logit_bias": {"5": 101}}, "100"),
        ({"logit_bias": {"513": 1}}, "511"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "1024"),
        ({"stop_token_ids": [512]}, "511"),
        ({"stop_token_ids": list(range(1025))}, "1024"),
        ({"bad_words": ["x"] * 257}, "256"),
        ({"cache_salt": "x" * 1025}, "1024"),
        ({"seed": 1 << 64}, str((1 << 64) - 1)),
        ({"min_tokens": 7}, "6"),
        ({"max_completion_tokens": 7}, "6"),
        ({"temperature": 101}, "100"),
        ({"samplers": ["magic"]}, "top_k"),
        ({"messages": []}, "1"),
        ({"messages": [{"role": "<user>", "content": "x"}]}, "A-Z"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "2047"),
        ({"messages": [{"role": "user", "content": "x" * 2047}]}, "2047"),
        ({"session_id": "a/b"}, "session_id"),
    ],
)
def test_errors_state_the_limit(client: httpx.Client, fields: dict[str, Any], number: str) -> None:
    assert number in error_of(client.post(CHAT, json=chat(**fields)), 400)["message"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"temperature": 101},
            "temperature",
            "temperature is 101; it must be a finite number from 0 to 100",
        ),
        (
            {"temperature": -0.5},
            "temperature",
            "temperature is -0.5; it must be a finite number from",
        ),
        ({"top_p": -1}, "top_p", "top_p is -1; it must be a finite number above 0 to 1"),
        ({"max_tokens": -2}, "max_tokens", "max_tokens is -2; it must be an integer from 0"),
        ({"top_p": 1e-46}, "top_p", "top_p is 1e-46; it must be a finite number from 1.17549e-38"),
        ({"n": 129}, "n", "n is 129; it must be an integer from 1 to 128"),
        ({"n": True}, "n", "n is true; it must be an integer"),
        ({"n": 1.5}, "n", "n is 1.5; it must be an integer"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens is a string; it must be an integer"),
        ({"stream": 1}, "stream", "stream is 1; it must be true or false"),
        ({"temperature": [1]}, "temperature", "temperature is a list; it must be a finite number"),
        (
            {"logit_bias": 1},
            "logit_bias",
            "logit_bias is 1; it must be a mapping of token ids to numbers, or a list of pairs",
        ),
        (
            {"logit_bias": [1]},
            "logit_bias[0]",
            "is 1; it must be [token id or text, bias or false]",
        ),
        (
            {"logit_bias": [[5, 101]]},
            "logit_bias[0][1]",
            "is 101; it must be a finite number from -100 to 100",
        ),
        (
            {"logit_bias": [[-1, 1]]},
            "logit_bias[0][0]",
            "is -1; it must be an integer from 0",
        ),
        (
            {"logit_bias": [["x" * 1025, 1]]},
            "logit_bias[0][0]",
            "has 1025 characters; it must have at most 1024",
        ),
        (
            {"logit_bias": {"5": 101}},
            "logit_bias[5]",
            "is 101; it must be a finite number from -100 to 100",
        ),
        ({"logit_bias": {"999": 1}}, "logit_bias", "is 999; it must be an integer from 0 to 511"),
        ({"user": 5}, "user", "user is 5; it must be a string"),
        ({"bad_words": ["x"] * 257}, "bad_words", "has 257 strings; it must have at most 256"),
        ({"bad_words": [""]}, "bad_words[0]", "has 0 characters; it must have at least 1"),
        (
            {"cache_salt": "x" * 1025},
            "cache_salt",
            "has 1025 characters; it must have at most 1024",
        ),
        ({"messages": []}, "messages", "messages has 0 items; it must have at least 1"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content is missing"),
        (
            {"messages": [{"role": "<user>", "content": "x"}]},
            "messages[0].role",
            "messages[0].role is a string; it must be a string like",
        ),
        ({"session_id": "a/b"}, "session_id", "session_id is a string; it must be a string like"),
        ({"top_logprobs": 2}, "top_logprobs", "is 2; it must be left out unless logprobs is true"),
        (
            {"max_completion_tokens": 7},
            "max_completion_tokens",
            "is 7; it must be left out or equal to max_tokens, 6",
        ),
        (
            {"allowed_token_ids": [0], "min_tokens": 1},
            "allowed_token_ids",
            "allowed_token_ids has 1 ids; bad_words and min_tokens 1",
        ),
    ],
)
def test_error_message_has_field_value_and_limit(
    client: httpx.Client, fields: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(client.post(CHAT, json=chat(**fields)), 400)
    assert error["param"] == param and message in error["message"], error


def test_completion_errors_name_a_field_of_the_body(client: httpx.Client) -> None:
    for fields, param, message in (
        ({}, "prompt", "prompt is missing"),
        ({"prompt": ""}, "prompt", "prompt has 0 tokens; it must have at least 1"),
        ({"prompt": [512]}, "prompt[0]", "prompt[0] is 512; it must be an integer from 0 to 511"),
        ({"prompt": ["x"] * 43, "n": 3}, "n", "n times the number of prompts is 129; it must be"),
        ({"prompt": ["x"] * 65}, "prompt", "prompt has 65 prompts; it must have at most 64"),
        ({"prompt": "x" * 3000}, "prompt", "prompt has 3000 tokens; it must have at most 2047"),
    ):
        error = error_of(client.post("/v1/completions", json=fields), 400)
        assert error["param"] == param and message in error["message"], error


def test_first_too_long_prompt_is_rejected_before_the_next_is_tokenised(
    client: httpx.Client,
) -> None:
    body = {"prompt": ["y" * 3000, UNTOUCHABLE]}
    error = error_of(client.post("/v1/completions", json=body), 400)
    assert "3000 tokens" in error["message"]


@pytest.mark.parametrize("path", ["/v1/images", "/v1/no/such_route"])
def test_unknown_api_route_is_named(client: httpx.Client, path: str) -> None:
    assert path in error_of(client.post(path, json={"input": "x"}), 404)["message"]
    odd = error_of(client.get("/v1/%3Cscript%3E" + "x" * 500), 404)
    assert odd["message"] == "there is no such route"


def test_long_texts_run_in_threads_on_every_route(client: httpx.Client) -> None:
    """The test server's tokenizer fails on the event loop with a 500."""
    text = "x" * 5000
    answer = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["a", text], "add_special_tokens": False}),
        (CHAT, chat(messages=answer[1:])),
        (CHAT, chat(messages=answer, continue_final_message=True)),
    ):
        assert "at most 2047" in error_of(client.post(path, json=body), 400)["message"]
    for fields in ({"prompt": text}, {"prompt": text, "add_special_tokens": False}):
        assert client.post("/tokenize", json=fields).json()["count"] == 5000
    assert client.post("/tokenize", json={"messages": answer}).json()["count"] > 5000


def test_completion_limits(client: httpx.Client) -> None:
    def refuse(number: str, **fields: Any) -> None:
        body = {"prompt": "x", **fields}
        error = error_of(client.post("/v1/completions", json=body), 400)
        assert number in error["message"], error

    refuse("64", prompt=["x"] * 65)
    refuse("128", prompt=["x"] * 43, n=3)
    refuse("511", prompt=[512])
    refuse("20", prompt_logprobs=21)
    refuse("262144", prompt=["x" * 2000] * 45, prompt_logprobs=20)
    refuse("4096", prompt=["x" * 2000] * 8, prompt_logprobs=0, stream=True)
    refuse("20", logprobs=21)
    refuse("1", prompt=[])
    refuse("0 tokens", prompt="")


def test_invalid_bodies(client: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    for body in (b"{", b"nonsense", b"[]", b"1", b"null", b'{"messages": NaN}', b"[" * 50_000):
        error_of(client.post(CHAT, content=body, headers=headers), 400)
    nan = b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}'
    assert (
        "temperature" in error_of(client.post(CHAT, content=nan, headers=headers), 400)["message"]
    )
    digits = b'{"prompt":"x","seed":' + b"1" * 5000 + b"}"
    error_of(client.post("/v1/completions", content=digits, headers=headers), 400)
    error_of(client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415)


def test_body_of_only_errors_is_cheap(client: httpx.Client) -> None:
    """One error is reported, not 100,000."""
    headers = {"content-type": "application/json"}
    for body in (
        {"prompt": [[1], "a"] * 5000},
        {"prompt": "x", **{f"f{i}": 1 for i in range(5000)}},
        {"prompt": "x", "stop": [1] * 20_000},
    ):
        content = json.dumps(body).encode()
        response = client.post("/v1/completions", content=content, headers=headers)
        assert error_of(response, 400)["message"] and len(response.text) < 1000
    wrong = {"messages": [{"role": 1}] * 5000}
    assert len(client.post(CHAT, json=wrong).text) < 1000


def test_lone_surrogates_are_handled(client: httpx.Client) -> None:
    body = b'{"prompt":"a\\ud800b","max_tokens":2}'
    headers = {"content-type": "application/json"}
    response = client.post("/v1/completions", content=body, headers=headers)
    assert response.status_code in (200, 400)


NUMERIC = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, (1 << 31) - 1),
    "min_p": (0, 1),
    "n": (1, 128),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 100),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "max_tokens": (-1, 1 << 31),
    "max_completion_tokens": (-1, 1 << 31),
    "min_tokens": (0, 1 << 31),
    "top_logprobs": (0, 20),
}
NUMBERS = st.one_of(
    st.integers(min_value=-(1 << 70), max_value=1 << 70),
    st.floats(),
    st.sampled_from([-1, 0, 1, 2, 20, 21, 100, 128, 129, 0.5, 1.0, 1.5, -2, 1 << 31, 1 << 63]),
    st.booleans(),
    st.text(max_size=3),
    st.none(),
)


@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)
@given(field=st.sampled_from(sorted(NUMERIC)), value=NUMBERS)
def test_every_number_is_accepted_or_rejected_by_name(
    client: httpx.Client, field: str, value: Any
) -> None:
    """Invalid values never reach the engine and never cause a 500."""
    body = chat(max_tokens=2, logprobs=True)
    if field == "n" and isinstance(value, int) and value > 4:
        body["max_tokens"] = 1
    if field == "max_completion_tokens":
        del body["max_tokens"]
    body[field] = value
    if field in ("max_tokens", "max_completion_tokens"):
        body["stop_token_ids"] = list(range(512))
    content = json.dumps(body).encode()
    response = client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert field in error["message"] or error["param"] == field
    elif value is not None:
        assert not isinstance(value, (bool, str))
        low, high = NUMERIC[field]
        assert low <= value <= high


def test_rejected_request_is_logged_with_its_reason(
    client: httpx.Client, server: ServerProcess
) -> None:
    """Errors of routes, middleware and framework: code and field are logged, not the message, which
    may contain client text."""
    refused = [
        client.post(CHAT, json=chat(temperature=-1)),
        client.post(CHAT, json=chat(model="nonesuch")),
        client.post(CHAT, json=chat(tools=[{"secret": 1}])),
        client.post(CHAT, content=b"text"),
        client.get("/v1/nothing"),
        client.get("/v1/models", headers={"Authorization": "Bearer wrong"}),
        client.get("/v1/models", headers={"Host": "elsewhere.example"}),
    ]
    for response in refused:
        error = response.json()["error"]
        reason = error["code"] or error["type"]
        expected = (error["request_id"], response.status_code, reason, error["param"])

        def logged() -> list[tuple[Any, ...]]:
            requests = [event for event in server.events() if event["message"] == "request"]
            names = ("request_id", "status", "error", "param")
            return [tuple(event.get(name) for name in names) for event in requests]

        server.wait_for(lambda expected=expected: expected in logged(), f"{expected} in the log")
    strict = {"x-llaisys-strict-fields": "1"}
    odd = client.post(CHAT, json=chat(**{"my secret field": 1}), headers=strict)
    assert odd.json()["error"]["param"] == "my secret field"
    assert not any("nonesuch" in line or "secret" in line for line in server.log)
    fine = client.get("/v1/models")
    server.wait_for(
        lambda: any(
            event.get("request_id") == fine.headers["x-request-id"] and "error" not in event
            for event in server.events()
        ),
        "a line without an error",
    )
