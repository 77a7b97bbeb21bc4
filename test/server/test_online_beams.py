"""`use_beam_search` and `best_of`; the fake model's most likely token has logprob -0.5."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from engine_fakes import FakeTokenizer
from http_helpers import CHAT, chat, error_of, reply

COMPLETIONS = "/v1/completions"


def complete(client: httpx.Client, path: str = COMPLETIONS, **fields: Any) -> Any:
    body = {"prompt": "abc", "max_tokens": 6, "ignore_eos": True, **fields}
    response = client.post(path, json=chat(**fields) if path == CHAT else body)
    assert response.status_code == 200, response.text
    return response.json()


def test_best_beam_is_the_greedy_answer(client: httpx.Client) -> None:
    body = complete(client, use_beam_search=True, n=3, logprobs=1)
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert choices[0]["text"] == FakeTokenizer().decode_tokens(reply("abc", 6))
    totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
    assert totals[0] == pytest.approx(-3.0) and totals == sorted(totals, reverse=True)
    assert len({choice["text"] for choice in choices}) == 3
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 18
    assert complete(client, use_beam_search=True, n=3)["choices"][0]["logprobs"] is None


def test_best_of_beams_returns_n(client: httpx.Client) -> None:
    wide = complete(client, use_beam_search=True, n=4, length_penalty=0.5)["choices"]
    found = complete(client, use_beam_search=True, best_of=4, n=2, length_penalty=0.5)["choices"]
    assert [choice["text"] for choice in found] == [choice["text"] for choice in wide[:2]]


def test_chat_with_beams_and_several_prompts(client: httpx.Client) -> None:
    plain = complete(client, CHAT)["choices"][0]["message"]["content"]
    body = complete(client, CHAT, use_beam_search=True, n=2)
    assert body["choices"][0]["message"]["content"] == plain and len(body["choices"]) == 2
    several = complete(client, use_beam_search=True, prompt=["abc", "abcd"], n=2)["choices"]
    assert [choice["index"] for choice in several] == [0, 1, 2, 3]
    assert several[2]["text"] == FakeTokenizer().decode_tokens(reply("abcd", 6))


def test_best_of_returns_the_most_likely_choices(client: httpx.Client) -> None:
    body = complete(client, best_of=4, n=2, temperature=1, seed=5)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 24  # all four were computed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "stream"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "n": 11}, "n"),
        ({"use_beam_search": True, "best_of": 11}, "best_of"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"length_penalty": 11}, "length_penalty"),
    ],
)
def test_conflicts_name_the_field(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert error_of(client.post(CHAT, json=chat(**fields)), 400)["param"] == param
