"""Prompt scoring over HTTP as evaluation tools use it: echo, prompt_logprobs, max_tokens 0."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from engine_fakes import FakeTokenizer
from http_helpers import CHAT, KEYS, chat, error_of, reply
from server_helpers import CONTEXT, ServerProcess
from wire_helpers import sse_events

COMPLETIONS = "/v1/completions"


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(COMPLETIONS, json={"temperature": 0, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_echo_with_logprobs_has_an_entry_per_token(client: httpx.Client) -> None:
    answer = complete(client, prompt="héy", echo=True, logprobs=2, max_tokens=3)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert [len(column) for column in logprobs.values()] == [4 + 3] * 4
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"][1:])
    assert logprobs["tokens"][:4] == ["h", "bytes:\\xc3", "bytes:\\xa9", "y"]
    assert logprobs["text_offset"][:4] == [0, 1, 1, 2]
    assert choice["text"].startswith("héy") and answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
def test_max_tokens_zero_returns_the_prompt_only(client: httpx.Client, prompt: Any) -> None:
    answer = complete(client, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["prompt_tokens"] == 3
    plain = complete(client, prompt=prompt, max_tokens=0)["choices"][0]
    assert plain["text"] == "" and plain["logprobs"] is None
    response = client.post(CHAT, json=chat(max_tokens=0))
    assert response.json()["choices"][0]["message"]["content"] == ""


def test_prompt_that_fills_the_context_can_be_scored(client: httpx.Client) -> None:
    answer = complete(client, prompt="x" * CONTEXT, echo=True, logprobs=0, max_tokens=0)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == CONTEXT
    body = {"prompt": "x" * CONTEXT, "echo": True, "logprobs": 0, "max_tokens": 1}
    assert str(CONTEXT - 1) in error_of(client.post(COMPLETIONS, json=body), 400)["message"]
    body = {"prompt": "x" * (CONTEXT + 1), "max_tokens": 0}
    assert str(CONTEXT) in error_of(client.post(COMPLETIONS, json=body), 400)["message"]


def test_prompt_logprobs_in_vllm_format(client: httpx.Client) -> None:
    choice = complete(client, prompt="ab", prompt_logprobs=2, max_tokens=1)["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None and choice["logprobs"] is None
    assert "98" in second and second["98"]["decoded_token"] == "b"
    assert {"logprob", "rank", "decoded_token"} == set(second["98"]) and len(second) <= 3
    body = client.post(CHAT, json=chat(prompt_logprobs=0)).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert client.post(CHAT, json=chat()).json()["prompt_logprobs"] is None


def test_stream_starts_with_echo_and_logprobs(client: httpx.Client) -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 4, "temperature": 0}
    whole = complete(client, **body)["choices"][0]
    columns: dict[str, list[Any]] = {}
    text = ""
    with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
        for event in sse_events(response):
            if event != "[DONE]":
                choice = json.loads(event)["choices"][0]
                text += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    columns.setdefault(name, []).extend(values)
    assert text == whole["text"] and columns == whole["logprobs"]
    several = {**body, "stream": True, "n": 2}
    assert error_of(client.post(COMPLETIONS, json=several), 400)["param"] == "n"
    error = error_of(client.post(CHAT, json=chat(stream=True, prompt_logprobs=1)), 400)
    assert error["param"] == "stream"


def test_logprobs_of_named_tokens_need_logprobs(client: httpx.Client) -> None:
    body = {"prompt": "a", "logprob_token_ids": [5, 6]}
    error = error_of(client.post(COMPLETIONS, json=body), 400)
    assert error["param"] == "logprob_token_ids"
    body = {"prompt": "a", "logprobs": 0, "logprob_token_ids": [512]}
    assert "511" in error_of(client.post(COMPLETIONS, json=body), 400)["message"]


def test_lm_eval_loglikelihood_request(client: httpx.Client) -> None:
    """Token ids with one extra token, and the response fields that lm_eval reads."""
    contexts = [[97, 98], [99]]
    continuations = [[100, 101], [102, 103, 104]]
    prompts = [c + d for c, d in zip(contexts, continuations, strict=True)]
    body = {
        "model": "fake", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1,
        "seed": 1234, "echo": True,
    }  # fmt: skip
    choices = complete(client, **body)["choices"]
    for prompt, context, choice in zip(prompts, contexts, choices, strict=True):
        values = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        assert len(values) == len(tops) == len(prompt) - len(context)
        assert all(
            isinstance(value, float) and top for value, top in zip(values, tops, strict=True)
        )


def test_openai_client_scores(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0)
    answer = client.completions.create(
        model="fake", prompt="abc", echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens == ["a", "b", "c"]


def test_scoring_does_not_affect_other_requests_or_prefix_caching(client: httpx.Client) -> None:
    prompt = "the same beginning of a prompt, " * 4
    before = complete(client, prompt=prompt, max_tokens=8, return_token_ids=True)
    complete(client, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    after = complete(client, prompt=prompt, max_tokens=8, return_token_ids=True)
    assert before["choices"][0]["token_ids"] == reply(prompt, 8)
    assert after["choices"] == before["choices"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    scored = complete(client, prompt=prompt, echo=True, logprobs=0, max_tokens=1)
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    tokens = FakeTokenizer().encode(prompt)
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == len(tokens) + 1
