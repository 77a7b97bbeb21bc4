"""Embeddings over HTTP: OpenAI's embeddings, vLLM's score, Jina's rerank, Ollama's embed."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from engine_fakes import HIDDEN, hidden_of
from http_helpers import CANARY, KEYS, TELLING, error_of
from server_helpers import CONTEXT, Gate, ServerProcess

EMBEDDINGS = "/v1/embeddings"


def unit(text: str, how: str = "last", dimensions: int = HIDDEN) -> Any:
    """The expected embedding of a text by the fake model."""
    tokens = list(text.encode())
    states = [hidden_of(token) for token in (tokens if how == "mean" else tokens[-1:])]
    vector = np.mean(states, axis=0)[:dimensions]
    return vector / np.linalg.norm(vector)


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def vectors(answer: dict[str, Any]) -> list[list[float]]:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return [entry["embedding"] for entry in answer["data"]]


@pytest.mark.parametrize(
    "given",
    ["abc", ["abc", "x"], [97, 98, 99], [[97, 98, 99], [120]]],
    ids=["text", "texts", "ids", "lists"],
)
def test_every_input_format(client: httpx.Client, given: Any) -> None:
    answer = post(client, EMBEDDINGS, model="fake", input=given)
    texts = ["abc", "x"][: len(answer["data"])]
    np.testing.assert_allclose(vectors(answer), [unit(text) for text in texts], atol=1e-6)
    count = sum(map(len, texts))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert answer["object"] == "list" and answer["model"] == "fake"
    assert answer["data"][0]["object"] == "embedding"


def test_base64_equals_float_format(client: httpx.Client) -> None:
    floats = vectors(post(client, EMBEDDINGS, input=["abc", "x"]))
    for fields in ({}, {"dimensions": 3}):
        answer = post(client, EMBEDDINGS, input=["abc"], encoding_format="base64", **fields)
        raw = base64.b64decode(answer["data"][0]["embedding"])
        found = np.frombuffer(raw, "<f4")
        if not fields:
            assert found.tolist() == floats[0]
        else:
            np.testing.assert_allclose(found, unit("abc", dimensions=3), atol=1e-6)


def test_pooling_dimensions_and_length(client: httpx.Client) -> None:
    (mean,) = vectors(post(client, EMBEDDINGS, input="abc", pooling="mean"))
    np.testing.assert_allclose(mean, unit("abc", "mean"), atol=1e-6)
    (plain,) = vectors(post(client, EMBEDDINGS, input="abc", normalize=False))
    np.testing.assert_allclose(plain, hidden_of(ord("c")), atol=1e-6)


def test_many_texts_keep_their_order(client: httpx.Client) -> None:
    """More texts than one batch."""
    texts = [f"text {number}" for number in range(150)]
    answer = post(client, EMBEDDINGS, input=texts, pooling="mean")
    expected = [unit(text, "mean") for text in texts]
    np.testing.assert_allclose(vectors(answer), expected, atol=1e-6)


def test_openai_client(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0]) as client:
        found = client.embeddings.create(model="fake", input=["abc", "x"])  # requests base64
        np.testing.assert_allclose(found.data[1].embedding, unit("x"), atol=1e-6)
        assert found.usage.prompt_tokens == 4


def test_scores_one_to_many_and_pairs(client: httpx.Client) -> None:
    answer = post(client, "/v1/score", model="fake", text_1="abc", text_2=["abc", "abx"])
    scores = [entry["score"] for entry in answer["data"]]
    assert scores == pytest.approx([1.0, float(unit("abc") @ unit("abx"))], abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == 9 and answer["id"].startswith("score-")
    pairs = post(client, "/score", text_1=["abc", "x"], text_2=["abx", "x"], pooling="mean")
    expected = [float(unit("abc", "mean") @ unit("abx", "mean")), 1.0]
    assert [entry["score"] for entry in pairs["data"]] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rerank_sorts_by_score(client: httpx.Client, path: str) -> None:
    texts = ["aq", "ac", "ax", "ab"]
    expected = sorted(range(4), key=lambda i: -float(unit("zc") @ unit(texts[i])))
    documents = [texts[0], {"text": texts[1], "title": "ignored"}, *texts[2:]]
    answer = post(client, path, model="fake", query="zc", documents=documents)
    assert [entry["index"] for entry in answer["results"]] == expected and expected[0] == 1
    assert [e["document"]["text"] for e in answer["results"]] == [texts[i] for i in expected]
    scores = [entry["relevance_score"] for entry in answer["results"]]
    assert scores == sorted(scores, reverse=True) and scores[0] == pytest.approx(1.0, abs=1e-6)
    few = post(client, path, query="zc", documents=texts, top_n=2, return_documents=False)
    kept = [{"index": i, "relevance_score": s} for i, s in zip(expected, scores, strict=True)]
    assert few["results"] == kept[:2]


def test_ollama_routes(client: httpx.Client) -> None:
    answer = post(client, "/api/embed", model="fake:latest", input=["abc", "x"])
    np.testing.assert_allclose(answer["embeddings"], [unit("abc"), unit("x")], atol=1e-6)
    assert answer["prompt_eval_count"] == 4 and answer["total_duration"] > 0
    short = post(client, "/api/embed", model="fake", input="abc", dimensions=2, truncate=True)
    np.testing.assert_allclose(short["embeddings"], [unit("abc", dimensions=2)], atol=1e-6)
    old = post(client, "/api/embeddings", model="fake", prompt="abc", keep_alive="5m")
    np.testing.assert_allclose(old["embedding"], hidden_of(ord("c")), atol=1e-6)
    assert post(client, "/api/embeddings", model="fake")["embedding"] == []
    assert post(client, "/api/embed", model="fake", input="")["embeddings"] == []


REJECTED: list[tuple[str, dict[str, Any], str]] = [
    (EMBEDDINGS, {"input": "x", "encoding_format": "hex"},
     'encoding_format is "hex"; it must be one of float, base64'),
    (EMBEDDINGS, {"input": "x", "encoding_format": 3},
     "encoding_format is 3; it must be one of float, base64"),
    (EMBEDDINGS, {"input": "x", "encoding_format": "my key is 1"},
     "encoding_format is a string; it must be one of float, base64"),
    (EMBEDDINGS, {"input": "x", "pooling": "max"},
     'pooling is "max"; it must be one of last, mean, cls'),
    (EMBEDDINGS, {"input": "x", "dimensions": 9},
     "dimensions is 9; it must be an integer from 1 to 8"),
    (EMBEDDINGS, {"input": "x", "dimensions": 0}, "dimensions is 0; it must be an integer from 1"),
    (EMBEDDINGS, {"input": ""}, "input has 0 tokens; it must have at least 1"),
    (EMBEDDINGS, {"input": []}, "input has 0 items; it must have at least 1"),
    (EMBEDDINGS, {"input": ["x"] * 2049}, "input has 2049 texts; it must have at most 2048"),
    (EMBEDDINGS, {"input": [1000]}, "input[0] is 1000; it must be an integer from 0 to"),
    (EMBEDDINGS, {"input": "x" * (CONTEXT + 1)},
     f"input has {CONTEXT + 1} tokens; it must have at most {CONTEXT}"),
    (EMBEDDINGS, {}, "input is missing"),
    (EMBEDDINGS, {"input": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]},
     "text_1 has 2 texts; it must have 1 or 3, as text_2"),
    ("/v1/rerank", {"query": "x", "documents": []},
     "documents has 0 items; it must have at least 1"),
    (EMBEDDINGS, {"input": ["x", ""]}, "input[1] has 0 tokens; it must have at least 1"),
    ("/v1/rerank", {"query": "x", "documents": ["a"], "top_n": -1}, "top_n is -1; it must be"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}],
     "reasoning_effort": "huge"}, 'reasoning_effort is "huge"; it must be'),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "text"), REJECTED)
def test_errors_have_field_value_and_limit(
    client: httpx.Client, path: str, body: dict[str, Any], text: str
) -> None:
    assert error_of(client.post(path, json=body), 400)["message"].startswith(text)


@pytest.mark.parametrize("path", [EMBEDDINGS, "/v1/score", "/v1/rerank", "/api/embed"])
def test_keys_model_names_and_leaks(server: ServerProcess, client: httpx.Client, path: str) -> None:
    body = {"input": "x", "text_1": "x", "text_2": "y", "query": "x", "documents": ["y"]}
    with server.client() as anonymous:
        assert anonymous.post(path, json=body).status_code == 401
    wrong = {"model": CANARY, CANARY: CANARY, "options": CANARY, "user": [CANARY]}
    wrong = client.post(path, json={**body, **wrong})
    assert wrong.status_code == 400 and not TELLING.search(wrong.text.replace(CANARY, "", 1))
    fields = {
        EMBEDDINGS: {"input": "x"},
        "/v1/score": {"text_1": "x", "text_2": "y"},
        "/v1/rerank": {"query": "x", "documents": ["y"]},
        "/api/embed": {"input": "x"},
    }[path]
    assert client.post(path, json={**fields, "model": "nope"}).status_code == 404
    assert client.post(path, content=b"{").status_code in (400, 415)
    assert client.get(path).status_code == 405


# ---- one client among others ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Gate]]:
    gate = Gate(tmp_path_factory.mktemp("gate"))
    with ServerProcess("--pooling", "mean", env=gate.env) as server:
        yield server.wait_ready(), gate


def test_configured_pooling(gated: tuple[ServerProcess, Gate]) -> None:
    with gated[0].client() as client:
        (mean,) = vectors(post(client, EMBEDDINGS, input="abc"))
        np.testing.assert_allclose(mean, unit("abc", "mean"), atol=1e-6)


def test_engine_error_is_a_500_and_next_request_succeeds(
    gated: tuple[ServerProcess, Gate],
) -> None:
    server, gate = gated
    with server.client() as client:
        gate.order("raise once")
        failed = error_of(client.post(EMBEDDINGS, json={"input": "abc"}), 500)
        assert failed["code"] == "engine_error"
        assert len(json.loads(client.post(EMBEDDINGS, json={"input": "abc"}).content)["data"]) == 1
    server.wait_idle()
