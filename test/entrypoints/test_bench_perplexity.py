"""`llaisys bench perplexity` against a direct computation, and rejected input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from model_files import tiny_config, write_hf_model

from llaisys import LLM, SamplingParams
from llaisys.bench.perplexity import steps_of
from llaisys.entrypoints.cli import main

CONTEXT = 80
TEXT = "".join(chr(97 + (7 * i * i + i) % 26) for i in range(200))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("perplexity")
    write_hf_model(directory, tiny_config("qwen2"))
    (directory / "text.txt").write_text(TEXT)
    return directory


def run(model: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, float]:
    arguments = ["bench", "perplexity", str(model), "--file", str(model / "text.txt"), "--json"]
    assert main([*arguments, "--context", str(CONTEXT), *more]) == 0
    result: dict[str, float] = json.loads(capsys.readouterr().out)
    return result


def test_second_halves_of_chunks_are_scored(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = []
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True)
    with LLM(model) as llm:
        for start in (0, CONTEXT):  # each byte of the text is a token
            output = llm.generate([TEXT[start : start + CONTEXT]], params)[0]
            assert output.prompt_logprobs is not None
            losses += [-entry.logprob for entry in output.prompt_logprobs[CONTEXT // 2 + 1 :]]
    result = run(model, capsys)
    assert (result["chunks"], result["tokens_scored"]) == (2, len(losses))
    assert result["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert "kl_divergence" not in result


def test_kl_divergence_from_reference(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = run(model, capsys, "--reference-dtype", "f32", "--chunks", "1")
    assert same["perplexity"] == same["reference_perplexity"]
    assert (same["kl_divergence"], same["top1_agreement"]) == (0, 1)
    other = run(model, capsys, "--quantization", "int4", "--reference", str(model))
    assert 0 < other["kl_divergence"] < 0.1
    assert other["perplexity"] != other["reference_perplexity"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--file", "nowhere.txt"], "nowhere.txt"),
        (["--context", "300"], "a text of at least 300 tokens"),
        (["--context", "1"], "context is 1"),
    ],
)
def test_invalid_perplexity_input_is_rejected(
    arguments: list[str], words: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "perplexity", str(model), "--file", str(model / "text.txt")]
    assert main([*command, *arguments]) != 0
    assert words in capsys.readouterr().err


def test_steps_cover_a_chunk_except_its_last_token() -> None:
    for context in (4, 5, 65, 66, 512):
        pieces = steps_of(context)
        assert pieces[0] == (0, context // 2) and pieces[-1][1] == context - 1
        assert [a[1] for a in pieces[:-1]] == [b[0] for b in pieces[1:]]
