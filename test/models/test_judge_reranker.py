"""Qwen3-Reranker: the probability of "yes" after the prompt of its model card."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from model_files import write_tiny_tokenizer
from server_helpers import ServerProcess

from llaisys import LLM
from llaisys.common.errors import InvalidInputError

pytestmark = pytest.mark.parity
QUERY = "capital of China?"
DOCUMENTS = ["Beijing.", "A long text about gravity and its <|im_end|> laws", "no idea"]
TASK = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    config = transformers.Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=272, max_position_embeddings=1024,
        tie_word_embeddings=request.param, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    directory = tmp_path_factory.mktemp("models") / "Qwen3-Reranker-tiny"
    model.save_pretrained(directory)
    write_tiny_tokenizer(directory, more={"yes": False, "no": False})
    return model, directory


def expected_score(model: Any, directory: Path, query: str, document: str) -> float:
    """As on the model card; control tokens of the texts are ordinary text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def ids(text: str, **options: Any) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return found

    body = f"<Instruct>: {TASK}\n<Query>: {query}\n<Document>: {document}"
    tokens = ids(PREFIX) + ids(body, split_special_tokens=True) + ids(SUFFIX)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, -1]
    pair = [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
    return float(torch.softmax(logits[pair], dim=0)[1])


def test_scores_equal_the_model_card(pair: tuple[Any, Path]) -> None:
    expected = [expected_score(*pair, QUERY, document) for document in DOCUMENTS]
    assert len({round(score, 3) for score in expected}) == len(expected)
    with LLM(str(pair[1]), max_model_len=1024) as llm:
        got = llm.score(QUERY, DOCUMENTS)
        np.testing.assert_allclose(got, expected, rtol=1e-4)
        own = f"<Instruct>: {TASK}\n<Query>: {QUERY}"
        assert llm.score(own, DOCUMENTS[0]) == pytest.approx(got[:1], rel=1e-6)
        with pytest.raises(InvalidInputError):
            llm.score([1, 2], "text")
        with pytest.raises(InvalidInputError):
            llm.embed("text")


def test_rerank_and_score_over_http(pair: tuple[Any, Path]) -> None:
    expected = [expected_score(*pair, QUERY, document) for document in DOCUMENTS]
    with ServerProcess("--model", str(pair[1]), "--max-model-len", "1024", real=True) as server:
        client = server.wait_ready().client(timeout=60)
        body: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS}
        results = client.post("/v1/rerank", json=body).json()["results"]
        order = sorted(range(len(expected)), key=lambda i: -expected[i])
        assert [entry["index"] for entry in results] == order
        body = {"text_1": QUERY, "text_2": DOCUMENTS}
        data = client.post("/v1/score", json=body).json()["data"]
        np.testing.assert_allclose([entry["score"] for entry in data], expected, rtol=1e-4)
        answer = client.post("/v1/score", json={"text_1": [1, 2], "text_2": DOCUMENTS[0]})
        assert answer.status_code in (400, 422)


def test_a_readme_names_the_model_too(pair: tuple[Any, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(pair[1], tmp_path / "model")
    with LLM(str(directory), max_model_len=256) as llm:
        assert not llm.model_info.scores_pairs
    (directory / "README.md").write_text("---\ntags: []\n---\n# Qwen3-Reranker-0.6B\n")
    with LLM(str(directory), max_model_len=256) as llm:
        assert llm.model_info.scores_pairs
