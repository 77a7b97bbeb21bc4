"""Fields of OpenAI's and vLLM's APIs beyond the common ones: logprobs of the sampled token, null
prompt fields, echo and custom roles in chats, truncated prompts, legacy functions, allowed tools.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from engine_fakes import FakeTokenizer
from http_helpers import CHAT, chat, error_of
from wire_helpers import sse_events

from llaisys.common.types import TokenLogprobs
from llaisys.server.generation.token_names import TokenNames
from llaisys.server.openai.response_objects import TextOffsets, completion_logprobs

COMPLETIONS = "/v1/completions"


def complete(client: httpx.Client, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 4, "ignore_eos": True, **fields}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def events_of(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(event) for event in sse_events(response) if event != "[DONE]"]


@pytest.mark.parametrize("count", [0, 2])
def test_top_logprobs_include_the_sampled_token(client: httpx.Client, count: int) -> None:
    fields = {"temperature": 10, "seed": 3, "max_tokens": 20}
    logprobs = complete(client, logprobs=count, **fields)["choices"][0]["logprobs"]
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert token in top and count <= len(top) <= count + 1
    names = TokenNames(FakeTokenizer())
    entry = TokenLogprobs.of(99, -3.0, 3, [(97, -0.5), (98, -1.0)][:count])
    made = completion_logprobs([entry], names, TextOffsets(names))
    assert made is not None and made["top_logprobs"][0].keys() == set("abc" if count else "c")


def test_prompt_fields_are_null_unless_requested(client: httpx.Client) -> None:
    choice = complete(client)["choices"][0]
    assert choice["prompt_logprobs"] is None and choice["prompt_token_ids"] is None
    assert complete(client, return_token_ids=True)["choices"][0]["prompt_token_ids"] == [97, 98, 99]
    answer = client.post(CHAT, json=chat()).json()
    assert answer["prompt_logprobs"] is None and answer["prompt_token_ids"] is None
    answer = client.post(CHAT, json=chat(return_token_ids=True)).json()
    assert bytes(answer["prompt_token_ids"]).decode() == "[user]hi[assistant]"
    first = events_of(client, chat(return_token_ids=True))[0]
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]


def test_model_objects_have_root_and_length(client: httpx.Client) -> None:
    (card, *_) = client.get("/v1/models").json()["data"]
    assert card["root"] == card["id"] and card["parent"] is None and card["max_model_len"] > 0


def test_chat_echo_repeats_the_continued_message(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So "}]
    body = chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    plain = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    body["echo"] = True
    assert client.post(CHAT, json=body).json()["choices"][0]["message"]["content"] == "So " + plain
    deltas = [event["choices"][0]["delta"] for event in events_of(client, body)]
    assert deltas[1] == {"content": "So "}
    assert "".join(delta.get("content") or "" for delta in deltas) == "So " + plain
    assert client.post(CHAT, json=chat(echo=True)).status_code == 200  # nothing to repeat


def test_custom_roles_reach_the_template(client: httpx.Client) -> None:
    body = chat(messages=[{"role": "critic", "content": "hm"}], verbose=True)
    assert client.post(CHAT, json=body).json()["__verbose"]["prompt"].startswith("[critic]hm")
    for role in ("<|im_end|>", "", "x" * 65, 7):
        error_of(client.post(CHAT, json=chat(messages=[{"role": role, "content": "x"}])), 400)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "vwx"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 100}, "abcdefghijklmnopqrstuvwx"),
        ({"truncate_prompt_tokens": -1}, "abcdefghijklmnopqrstuvwx"),
    ],
)
def test_truncated_prompt(client: httpx.Client, fields: dict[str, Any], kept: str) -> None:
    prompt = "abcdefghijklmnopqrstuvwx"
    answer = complete(client, prompt=prompt, return_token_ids=True, **fields)
    assert bytes(answer["choices"][0]["prompt_token_ids"]).decode() == kept
    assert answer["usage"]["prompt_tokens"] == len(kept)
    answer = complete(client, "/completion", prompt=prompt, **fields)
    assert answer["tokens_evaluated"] == len(kept)


def test_truncation_admits_long_prompts(client: httpx.Client) -> None:
    length = client.get("/v1/models").json()["data"][0]["max_model_len"]
    prompt = "x" * (2 * length)
    error_of(client.post(COMPLETIONS, json={"prompt": prompt}), 400)
    answer = complete(client, prompt=prompt, truncate_prompt_tokens=-1, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == length - 1
    body = {"prompt": prompt, "truncate_prompt_tokens": length + 1}
    error = error_of(client.post(COMPLETIONS, json=body), 400)
    assert error["param"] == "truncate_prompt_tokens"
