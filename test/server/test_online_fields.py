"""Ignored fields are named in a header, and --strict-fields rejects them. Aliases and special
values of other servers are supported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from engine_fakes import FakeTokenizer
from http_helpers import CHAT, chat, error_of
from server_helpers import CONTEXT, ServerProcess

from llaisys.common.validation import MIN_FLOAT
from llaisys.server.schemas.chat import CompletionRequest

IGNORED = "x-llaisys-ignored-fields"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def strict() -> Iterator[ServerProcess]:
    with ServerProcess("--strict-fields", "--no-ui") as process:
        yield process.wait_ready()


def ignored(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    names = response.headers.get(IGNORED, "")
    return names.split(", ") if names else []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", {"session": "1"}),
        ("store", True),
        ("service_tier", "flex"),
        ("safety_identifier", "u1"),
        ("prompt_cache_key", "k"),
        ("verbosity", "low"),
        ("prediction", {"type": "content", "content": "x"}),
        ("keep_alive", "5m"),
        ("t_max_prompt_ms", 500),
        ("n_discard", 1),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_ignored_hints_are_named_in_a_header(
    client: httpx.Client, strict: ServerProcess, field: str, value: Any
) -> None:
    plain = client.post(CHAT, json=chat())
    response = client.post(CHAT, json=chat(**{field: value}))
    assert ignored(response) == [field] and ignored(plain) == []
    assert response.json()["choices"] == plain.json()["choices"]
    with strict.client() as there:
        assert error_of(there.post(CHAT, json=chat(**{field: value})), 400)["param"] == field


def test_neutral_hint_values_are_not_reported(client: httpx.Client, strict: ServerProcess) -> None:
    body = chat(metadata=None, store=False, service_tier="auto", mirostat=0, user="me")
    assert ignored(client.post(CHAT, json=body)) == []
    with strict.client() as there:
        assert ignored(there.post(CHAT, json=body)) == []


def test_stream_names_ignored_fields(client: httpx.Client) -> None:
    with client.stream("POST", CHAT, json=chat(stream=True, store=True)) as response:
        response.read()
        assert ignored(response) == ["store"]


def test_extra_message_fields_are_named_by_path(
    client: httpx.Client, strict: ServerProcess
) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part], "id": "m1", "timestamp": 5, "annotations": []}
    response = client.post(CHAT, json=chat(messages=[message, message]))
    assert sorted(ignored(response)) == [
        "messages[].content[].cache_control", "messages[].id", "messages[].timestamp",
    ]  # fmt: skip
    odd = {"role": "user", "content": "hi", "my\nkey": 1, "x" * 500: 2}
    assert ignored(client.post(CHAT, json=chat(messages=[odd]))) == []
    with strict.client() as there:
        error = error_of(there.post(CHAT, json=chat(messages=[message])), 400)
        assert error["param"].startswith("messages[0].") and error["code"] == "unknown_field"


def test_strict_fields_suggests_the_nearest_name(strict: ServerProcess) -> None:
    with strict.client() as there:
        error = error_of(there.post(CHAT, json=chat(Temperature=1)), 400)
        assert error["message"] == "unknown field 'Temperature'; did you mean 'temperature'?"
        body = chat(stream=True, stream_options={"usage_": 1})
        error = error_of(there.post(CHAT, json=body), 400)
        assert error["param"] == "stream_options.usage_"
        assert "stream_options.usage_" in error["message"]


@pytest.mark.parametrize(
    ("kind", "shown"),
    [("image_url", "an image"), ("input_audio", "audio"), ("video_url", "a video"),
     ("file", "a file")],
)  # fmt: skip
def test_media_parts_are_rejected_by_a_text_model(
    client: httpx.Client, kind: str, shown: str
) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "data:secret"}}]
    message = {"role": "user", "content": parts}
    error = error_of(client.post(CHAT, json=chat(messages=[message])), 400)
    assert error["param"] == "messages[0].content[1]" and error["code"] == "text_only"
    assert f"{shown}; this is a text model" in error["message"] and "secret" not in str(error)


def completion(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "abc", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = client.post(COMPLETIONS, json={**body, **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


@pytest.mark.parametrize("fields", [{"max_tokens": 7.0}, {"n_predict": 7}, {"num_predict": 7}])
def test_aliases_of_max_tokens(client: httpx.Client, fields: dict[str, Any]) -> None:
    assert completion(client, **fields) == completion(client, max_tokens=7)


def test_max_tokens_minus_one_fills_the_context(client: httpx.Client) -> None:
    assert len(completion(client, max_tokens=-1)["token_ids"]) == CONTEXT - 3
    body = chat(max_tokens=None, n_predict=-1, ignore_eos=True)
    assert client.post(CHAT, json=body).json()["usage"]["total_tokens"] == CONTEXT


def test_field_aliases(client: httpx.Client, strict: ServerProcess) -> None:
    penalised = completion(client, max_tokens=40, repetition_penalty=1.9)
    assert completion(client, max_tokens=40, repeat_penalty=1.9) == penalised
    body = chat(messages=[{"role": "user", "content": "again and again " * 8}])
    client.post(CHAT, json=body)
    for fields, reused in (
        ({}, True),
        ({"cache_prompt": True}, True),
        ({"cache_prompt": False}, 0),
    ):
        usage = client.post(CHAT, json={**body, **fields}).json()["usage"]
        assert bool(usage["prompt_tokens_details"]["cached_tokens"]) == bool(reused)
    error = error_of(client.post(CHAT, json=chat(n_predict=7)), 400)  # max_tokens is 6
    assert error["param"] == "n_predict"
    with strict.client() as there:
        assert error_of(there.post(CHAT, json=chat(n_predict=6)), 400)["param"] == "n_predict"


def test_repeat_last_n_zero_disables_penalties(client: httpx.Client) -> None:
    penalties = {"repeat_penalty": 1.5, "frequency_penalty": 1.0}
    assert ignored(client.post(CHAT, json=chat(repeat_last_n=64, **penalties))) == []
    params = CompletionRequest(prompt="x", repeat_last_n=0, **penalties).to_sampling()
    assert not params.uses_penalties
    assert CompletionRequest(prompt="x", **penalties).to_sampling().uses_penalties


def test_samplers_of_llama_cpp_are_fields(client: httpx.Client) -> None:
    body = chat(mirostat=2, dry_multiplier=0.8, dry_base=1.75, dry_sequence_breakers='["x"]')
    assert ignored(client.post(CHAT, json=body)) == []
    params = CompletionRequest(prompt="x", mirostat_mode=1, dry_sequence_breakers='["a"]')
    assert params.to_sampling().mirostat == 1
    assert params.to_sampling().dry_sequence_breakers == ("a",)
    response = client.post(CHAT, json=chat(dry_sequence_breakers="[1"))
    assert error_of(response, 400)["param"] == "dry_sequence_breakers"


def test_empty_grammar_is_no_grammar() -> None:
    assert CompletionRequest(prompt="x", grammar="").to_sampling().structured_outputs is None


def test_top_p_zero_is_the_smallest_top_p() -> None:
    """It leaves only the most likely token."""
    for zero in (0, 0.0):
        params = CompletionRequest(prompt="x", top_p=zero).to_sampling()
        assert params.top_p == MIN_FLOAT


def test_empty_stop_strings_are_ignored(client: httpx.Client) -> None:
    plain = completion(client, max_tokens=20)
    assert completion(client, max_tokens=20, stop="") == plain
    assert completion(client, max_tokens=20, stop=["", ""]) == plain
    ended = completion(client, max_tokens=20, stop=["", plain["text"][5]])
    assert ended["finish_reason"] == "stop"


def test_seed_minus_one_means_random(client: httpx.Client) -> None:
    options = {"max_tokens": 20, "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "seed": -1}
    found = {tuple(completion(client, **options)["token_ids"]) for _ in range(4)}
    assert len(found) > 1


def test_logit_bias_as_pairs_of_tokens_or_texts(client: httpx.Client) -> None:
    plain = completion(client, max_tokens=8)
    first = plain["token_ids"][0]
    by_id = completion(client, max_tokens=8, logit_bias=[[first, False]])
    assert first not in by_id["token_ids"]
    assert completion(client, max_tokens=8, logit_bias={str(first): False}) == by_id
    by_text = completion(client, max_tokens=40, logit_bias=[["Zq", False]])
    assert not set(by_text["token_ids"]) & set(b"Zq")
    everything = [[token, False] for token in range(512)]
    error = error_of(client.post(CHAT, json=chat(logit_bias=everything)), 400)
    assert error["param"] == "logit_bias"


def test_text_bias_applies_to_each_token() -> None:
    body = CompletionRequest(prompt="x", logit_bias=[[5, 1.5], ["Zq", -100], [7, False]])
    body.name_tokens(FakeTokenizer())
    assert body.to_sampling().logit_bias == {5: 1.5, 90: -100, 113: -100, 7: float("-inf")}


def test_wrong_v1_prefix_is_suggested(client: httpx.Client) -> None:
    for path in ("/v1/v1/chat/completions", "/openai/chat/completions"):
        message = error_of(client.post(path, json=chat()), 404)["message"]
        assert "did you mean /v1/chat/completions?" in message and "openai" not in message
    assert "did you mean" not in error_of(client.get("/nothing"), 404)["message"]


def test_cors_failure_logs_a_hint(strict: ServerProcess) -> None:
    origin = "http://app.example:3000"
    preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    with strict.client() as client:
        client.options(CHAT, headers=preflight)
        assert client.post(CHAT, json=chat(), headers={"Origin": origin}).status_code == 403

        def hints() -> list[str]:
            return [line for line in strict.log if "--allowed-origin" in line]

        strict.wait_for(lambda: bool(hints()), "the hint")
        assert len(hints()) == 1 and "app.example" not in hints()[0]


def test_root_is_404_without_a_page(strict: ServerProcess) -> None:
    with strict.client() as client:
        error_of(client.get("/"), 404)
