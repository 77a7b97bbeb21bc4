"""Encoders over HTTP: embeddings with the model's pooling, scores of a reranker, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from encoder_models import hidden_states, make_encoder, save_encoder
from server_helpers import ServerProcess

pytestmark = pytest.mark.parity
QUERY, DOCUMENTS = "the cat", ["a dog ran", "mat", "cats on the mat sat"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reranker")


@pytest.fixture(scope="module")
def reranker(directory: Path) -> Any:
    model = make_encoder("bert", "ForSequenceClassification")
    save_encoder(model, directory)
    return model


@pytest.fixture(scope="module")
def client(reranker: Any, directory: Path) -> Iterator[httpx.Client]:
    with (
        ServerProcess("--model", str(directory), real=True) as server,
        server.wait_ready().client() as client,
    ):
        yield client


@pytest.fixture(scope="module")
def expected(reranker: Any, directory: Path) -> list[float]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        logits = [
            reranker(**tokenizer(QUERY, text, return_tensors="pt")).logits for text in DOCUMENTS
        ]
    return [float(torch.sigmoid(logit)) for logit in logits]


def test_scores_of_one_text_with_many_and_of_pairs(
    client: httpx.Client, expected: list[float]
) -> None:
    for text_1 in (QUERY, [QUERY] * len(DOCUMENTS)):
        answer = client.post("/score", json={"text_1": text_1, "text_2": DOCUMENTS}).json()
        np.testing.assert_allclose([d["score"] for d in answer["data"]], expected, rtol=1e-4)
    assert answer["usage"]["prompt_tokens"] == 8 + 6 + 11


def test_rerank_sorts_by_the_scores_of_the_model(
    client: httpx.Client, expected: list[float]
) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    results = client.post("/v1/rerank", json=body).json()["results"]
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])[:2]
    assert [entry["index"] for entry in results] == order
    np.testing.assert_allclose(
        [entry["relevance_score"] for entry in results], [expected[i] for i in order], rtol=1e-4
    )


CHAT = {"messages": [{"role": "user", "content": "the cat"}]}


def test_generation_embeddings_and_long_pairs_are_refused(client: httpx.Client) -> None:
    pair = {"query": "cat " * 50, "documents": ["dog " * 50]}
    for path, body, message in (
        ("/v1/completions", {"prompt": "the cat"}, "bert is an encoder, which generates no text"),
        ("/v1/chat/completions", CHAT, "is an encoder, which generates no text"),
        ("/api/chat", {"model": "", **CHAT}, "is an encoder, which generates no text"),
        ("/v1/embeddings", {"input": "the cat"}, "reranker"),
        ("/v1/rerank", pair, "96"),
    ):
        response = client.post(path, json=body)
        assert response.status_code == 400 and message in response.text


def test_embeddings_with_the_pooling_of_the_model(tmp_path: Path) -> None:
    model = make_encoder("xlm-roberta")
    save_encoder(model, tmp_path, "mean_tokens")
    with (
        ServerProcess("--model", str(tmp_path), real=True) as server,
        server.wait_ready().client() as client,
    ):
        answer = client.post("/v1/embeddings", json={"input": [[5, 6, 7, 8]]}).json()
    mean = hidden_states(model, [5, 6, 7, 8]).mean(axis=0)
    (entry,) = answer["data"]
    np.testing.assert_allclose(entry["embedding"], mean / np.linalg.norm(mean), atol=1e-5)
