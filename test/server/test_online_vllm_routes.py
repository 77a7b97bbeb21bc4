"""vLLM's routes and options: batches of chats, /invocations, /load, /ping, load reports, prompts as
token ids, logprobs of the whole vocabulary, usage in every chunk, a root path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from engine_fakes import VOCAB
from http_helpers import CHAT, chat, error_of
from server_helpers import ServerProcess
from wire_helpers import sse_events

BATCH = "/v1/chat/completions/batch"
CONVERSATIONS = [[{"role": "user", "content": text}] for text in ("hi", "hello there", "hi")]


@pytest.fixture(scope="module")
def other() -> Iterator[ServerProcess]:
    """A server with the options of vLLM that are off by default."""
    options = ["--max-logprobs", "-1", "--root-path", "/llm", "--enable-force-include-usage"]
    options += ["--seed", "42", "--default-chat-template-kwargs", '{"start": "s", "other": 1}']
    with ServerProcess(*options, "--return-tokens-as-token-ids", "--no-ui") as process:
        yield process.wait_ready()


def events_of(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(event) for event in sse_events(response) if event != "[DONE]"]


def test_batch_answers_each_conversation(client: httpx.Client) -> None:
    answer = client.post(BATCH, json=chat(messages=CONVERSATIONS))
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for messages, choice in zip(CONVERSATIONS, choices, strict=True):
        single = client.post(CHAT, json=chat(messages=messages)).json()["choices"][0]
        assert choice["message"] == single["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"session_id": "s"}, "session_id"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": CONVERSATIONS[0]}, "messages[0]"),
        ({"messages": CONVERSATIONS * 30}, "messages"),
    ],
)
def test_batch_rejects_fields_of_one_conversation(
    client: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    error = error_of(client.post(BATCH, json=chat(**{"messages": CONVERSATIONS, **fields})), 400)
    assert error["param"] == param
    if "messages" not in fields:
        assert (
            error["message"] == f"{param} is given; it must be left out in a batch of conversations"
        )


def test_invocations_choose_the_route_by_field(client: httpx.Client) -> None:
    bodies = {
        CHAT: chat(),
        "/v1/completions": {"prompt": "abc", "max_tokens": 4, "temperature": 0},
        "/v1/embeddings": {"input": "abc"},
        "/v1/score": {"text_1": "a", "text_2": "b"},
        "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    }
    for path, body in bodies.items():
        direct = client.post(path, json=body)
        forwarded = client.post("/invocations", json=body)
        assert forwarded.status_code == direct.status_code == 200, forwarded.text
        for name in ("choices", "data", "results"):
            assert forwarded.json().get(name) == direct.json().get(name)
    assert events_of(client, "/invocations", chat())[0]["object"] == "chat.completion.chunk"
    padded = chat(messages=[{"role": "user", "content": "hi " * 8000}], drop_old_turns=True)
    assert error_of(client.post("/invocations", json=padded), 400)["param"] == "messages"


def test_invocations_report_errors_of_their_route(client: httpx.Client) -> None:
    error_of(client.post("/invocations", json={"model": "fake"}), 400)
    error_of(client.post("/invocations", json=[1]), 400)
    headers = {"content-type": "application/json"}
    response = client.post("/invocations", content=b"{", headers=headers)
    assert error_of(response, 400)["code"] == "invalid_json"
    error = error_of(client.post("/invocations", json=chat(temperature=-1)), 400)
    assert error["param"] == "temperature"


def test_status_routes(client: httpx.Client, server: ServerProcess) -> None:
    assert client.get("/load").json() == {"server_load": 0}
    with server.client() as anonymous:  # SageMaker's probe has no key
        assert anonymous.get("/ping").status_code == 200
        assert anonymous.post("/ping").status_code == 200
        assert anonymous.get("/load").status_code == 401


def test_load_counts_open_requests(client: httpx.Client) -> None:
    body = chat(max_tokens=200, stream=True, ignore_eos=True)
    with client.stream("POST", CHAT, json=body) as response:
        chunks = response.iter_raw()
        next(chunks)
        assert client.get("/load").json() == {"server_load": 1}
        list(chunks)
    assert client.get("/load").json() == {"server_load": 0}


def test_load_report_in_a_header(client: httpx.Client) -> None:
    def report(format: str) -> str | None:
        headers = {"endpoint-load-metrics-format": format}
        return client.post(CHAT, json=chat(), headers=headers).headers.get("endpoint-load-metrics")

    text, found = report("TEXT"), report("json")
    assert text is not None and text.startswith("TEXT named_metrics.kv_cache_usage_perc=0.")
    assert found is not None and found.startswith("JSON ")
    metrics = json.loads(found.removeprefix("JSON "))["named_metrics"]
    assert metrics.keys() == {"kv_cache_usage_perc", "num_requests_waiting"}
    assert report("BIN") is None


def test_prompt_ids_of_kv_transfer_replace_the_messages(client: httpx.Client) -> None:
    ids = client.post(CHAT, json=chat(return_token_ids=True)).json()["prompt_token_ids"]
    other = chat(
        messages=[{"role": "user", "content": "something else"}],
        kv_transfer_params={"prompt_token_ids": ids, "do_remote_prefill": True},
        return_token_ids=True,
    )
    answer = client.post(CHAT, json=other)
    assert answer.json()["prompt_token_ids"] == ids
    assert (
        answer.json()["choices"][0]["message"]
        == (client.post(CHAT, json=chat()).json()["choices"][0]["message"])
    )
    assert answer.headers["x-llaisys-ignored-fields"] == "kv_transfer_params.do_remote_prefill"
    assert events_of(client, CHAT, other)[0]["prompt_token_ids"] == ids
    for bad in ([], [-1], ["a"], [VOCAB + 5], [97] * 9000):
        body = chat(kv_transfer_params={"prompt_token_ids": bad})
        error_of(client.post(CHAT, json=body), 400)


def test_tokenize_continues_the_last_message(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So "}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    ids = client.post("/tokenize", json=body).json()["tokens"]
    assert bytes(ids).decode() == "[user]hi[assistant]So "
    body["messages"] = messages[:1]
    error = error_of(client.post("/tokenize", json=body), 400)
    assert error["param"] == "messages[0].role"


# ---- the options ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [-1, 21])
def test_more_logprobs_than_allowed_are_rejected(client: httpx.Client, count: int) -> None:
    prompt = {"prompt": "abc", "max_tokens": 1}
    for path, name, body in (
        (CHAT, "top_logprobs", chat(logprobs=True)),
        (CHAT, "prompt_logprobs", chat()),
        ("/v1/completions", "logprobs", prompt),
        ("/v1/completions", "prompt_logprobs", prompt),
    ):
        error = error_of(client.post(path, json={**body, name: count}), 400)
        assert error["param"] == name
        assert error["message"] == f"{name} is {count}; it must be an integer from 0 to 20"


def test_logprobs_of_the_vocabulary(other: ServerProcess) -> None:
    with other.client() as client:
        answer = client.post(CHAT, json=chat(logprobs=True, top_logprobs=-1, max_tokens=2))
        for entry in answer.json()["choices"][0]["logprobs"]["content"]:
            assert len({top["token"] for top in entry["top_logprobs"]}) == VOCAB
        answer = client.post(CHAT, json=chat(prompt_logprobs=-1))
        assert answer.json()["prompt_logprobs"][0] is None
        assert {len(entry) for entry in answer.json()["prompt_logprobs"][1:]} == {VOCAB}
        body = {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": -1, "temperature": 0}
        found = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
        assert [top and len(top) for top in found["top_logprobs"]] == [None] + 4 * [VOCAB]
        error_of(client.post("/v1/completions", json={**body, "logprobs": VOCAB + 1}), 400)


def test_server_options_set_request_fields(other: ServerProcess) -> None:
    with other.client() as client:
        events = events_of(client, CHAT, chat(logprobs=True, ignore_eos=True))
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts[0] == 0 and counts[-1] == 6 and events[-1]["choices"] == []
        tokens = [entry["token"] for event in events[:-1] for choice in event["choices"]
                  for entry in (choice["logprobs"] or {"content": []})["content"]]  # fmt: skip
        assert len(tokens) == 6 and all(token.startswith("token_id:") for token in tokens)
        events = events_of(client, CHAT, chat(stream_options={"include_usage": False}))
        assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1]["usage"]["completion_tokens"] == 6
        as_text = chat(logprobs=True, return_tokens_as_token_ids=False)
        entries = client.post(CHAT, json=as_text).json()["choices"][0]["logprobs"]["content"]
        assert not any(entry["token"].startswith("token_id:") for entry in entries)


def test_chunks_with_usage_each_have_further_tokens(client: httpx.Client) -> None:
    """As in vLLM: the last chunk with text has the finish reason."""
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for path, body in (
        (CHAT, chat(ignore_eos=True, **options)),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 6, "ignore_eos": True, **options}),
    ):
        *chunks, last = events_of(client, path, body)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(set(counts)) and counts[-1] == 6 and last["choices"] == []
        choice = chunks[-1]["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice.get("text") or choice["delta"]["content"]


def test_default_template_variables(other: ServerProcess) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with other.client() as client:
        for given, start in ((None, "s"), ({"start": "t"}, "t"), ({"x": 1}, "s")):
            body = {"messages": messages, "chat_template_kwargs": given}
            text = f"{start}[user]hi[assistant]"
            assert client.post("/apply-template", json=body).json() == {"prompt": text}
            assert bytes(client.post("/tokenize", json=body).json()["tokens"]).decode() == text
            answer = client.post(CHAT, json=chat(**body, return_token_ids=True)).json()
            assert bytes(answer["prompt_token_ids"]).decode() == text


def test_server_seed_is_that_of_each_request(other: ServerProcess) -> None:
    """As llama.cpp's --seed."""
    with other.client() as client:

        def complete(**fields: Any) -> tuple[str, int]:
            body = {"prompt": "abc", "n_predict": 8, "temperature": 1, **fields}
            found = client.post("/completion", json=body).json()
            return found["content"], found["generation_settings"]["seed"]

        assert complete() == complete() == complete(seed=42)
        assert complete()[1] == 42 and complete(seed=7)[1] == 7
        assert len({complete(seed=-1)[1] for _ in range(3)} - {42}) == 3


def test_root_path(other: ServerProcess) -> None:
    with other.client() as client:
        for prefix in ("", "/llm"):
            assert client.get(f"{prefix}/v1/models").status_code == 200
            assert client.post(f"{prefix}{CHAT}", json=chat()).status_code == 200
        error_of(client.get("/llmx/v1/models"), 404)
        error_of(client.get("/llm"), 404)
