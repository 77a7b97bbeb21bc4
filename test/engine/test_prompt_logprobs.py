"""Prompt logprobs equal transformers in any batch and are complete."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fakes import adapter_of, greedy, make_engine, run_all
from error_helpers import naming
from reference_models import Tiny, make_reference, random_tokens, reference_logits, save

from llaisys import LLM, SamplingParams
from llaisys.common.errors import InvalidInputError
from llaisys.common.types import RequestOutput

TINY = Tiny(layers=2, intermediate=102)
LENGTHS = (1, 2, 5, 16, 17, 40, 90, 33)
PROMPTS = [random_tokens(length, TINY.vocab, seed=length) for length in LENGTHS]
SCORING = SamplingParams(
    max_tokens=0, temperature=0.0, prompt_logprobs=3, detokenize=False, ignore_eos=True
)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_reference(TINY, seed=1)


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Any) -> list[Any]:
    """[tokens, vocab] of log-probabilities for each prompt."""
    found = []
    for prompt in PROMPTS:
        logits = reference_logits(model, prompt).astype(np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        found.append(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
    return found


def check_scores(output: RequestOutput, logprobs: Any, top: int = 3) -> None:
    entries = output.prompt_logprobs
    assert entries is not None
    prompt = output.prompt_token_ids
    assert [entry.token_id for entry in entries] == prompt
    assert math.isnan(entries[0].logprob) and entries[0].rank == 0
    for place, entry in enumerate(entries[1:], 1):
        row = logprobs[place - 1]
        assert entry.logprob == pytest.approx(row[prompt[place]], abs=2e-5)
        value = row[prompt[place]]  # others may be as likely, as far as rounding can tell
        ranks = [1 + int((row > value + edge).sum()) for edge in (1e-5, -1e-5)]
        assert ranks[0] <= entry.rank <= ranks[1]
        best = np.sort(row)[::-1][:top]
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=2e-5)


@pytest.mark.parity
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="default"),
        pytest.param({"max_num_batched_tokens": 16, "max_num_seqs": 16}, id="chunked"),
        pytest.param({"max_prompt_logprob_tokens": 7}, id="few-rows-a-step"),
        pytest.param({"num_kv_blocks": 9}, id="tiny-pool"),
        pytest.param({"tensor_parallel_size": 2}, id="two-ranks"),
    ],
)
def test_prompt_logprobs_equal_transformers(
    directory: Path, expected: list[Any], options: dict[str, int]
) -> None:
    with LLM(str(directory), max_model_len=128, **options) as llm:  # type: ignore[arg-type]
        llm.generate(PROMPTS, SCORING.clone(prompt_logprobs=None))  # leaves prefixes behind
        outputs = llm.generate(PROMPTS, SCORING)
    for output, logprobs in zip(outputs, expected, strict=True):
        check_scores(output, logprobs)
        assert output.token_ids == [] and output.finish_reason == "length"


@pytest.mark.parity
def test_prompt_logprobs_do_not_depend_on_batch_or_preemption(
    directory: Path, expected: list[Any]
) -> None:
    both = SCORING.clone(max_tokens=20)
    plain = both.clone(prompt_logprobs=None)
    with LLM(str(directory), max_model_len=128, num_kv_blocks=10) as llm:
        params = [both if place % 2 else plain for place in range(len(PROMPTS))]
        outputs = llm.generate(PROMPTS, params)
        assert llm.stats()["num_preemptions"] > 0
    with LLM(str(directory), max_model_len=128) as llm:
        alone = [llm.generate([prompt], both)[0] for prompt in PROMPTS]
    for place, (output, other) in enumerate(zip(outputs, alone, strict=True)):
        assert output.token_ids == other.token_ids
        check_scores(other, expected[place])
        if place % 2:
            assert output.prompt_logprobs is not None and other.prompt_logprobs is not None
            assert output.prompt_logprobs[1:] == other.prompt_logprobs[1:]
        else:
            assert output.prompt_logprobs is None


@pytest.mark.parity
def test_prompt_that_fills_the_context_has_logprobs(directory: Path, model: Any) -> None:
    prompt = random_tokens(64, TINY.vocab, seed=9)
    with LLM(str(directory), max_model_len=64) as llm:
        (output,) = llm.generate([prompt], SCORING)
        with pytest.raises(InvalidInputError):
            llm.generate([prompt], SCORING.clone(max_tokens=1))
        with pytest.raises(InvalidInputError):
            llm.generate([[*prompt, 1]], SCORING)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 64


@pytest.mark.parity
def test_logprob_token_ids_are_reported_per_position(directory: Path, model: Any) -> None:
    named = [7, 300, 0]
    params = SamplingParams(
        max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=0, logprob_token_ids=named,
        detokenize=False,
    )  # fmt: skip
    with LLM(str(directory), max_model_len=128) as llm:
        (output,) = llm.generate([PROMPTS[4]], params)
        with naming(InvalidInputError, "logprob_token_ids"):
            llm.generate([PROMPTS[4]], params.clone(logprob_token_ids=[TINY.vocab]))
    full = [*PROMPTS[4], *output.token_ids]
    logits = reference_logits(model, full).astype(np.float64)
    entries = output.outputs[0].logprobs
    assert entries is not None
    for place, entry in enumerate(entries):
        row = logits[len(PROMPTS[4]) + place - 1]
        row = row - row.max() - np.log(np.exp(row - row.max()).sum())
        expected = named if entry.token_id in named else [*named, entry.token_id]
        assert [token for token, _ in entry.top] == expected
        values = [value for _, value in entry.top]
        assert values == pytest.approx([row[token] for token in expected], abs=2e-5)


def test_all_logprobs_of_each_token(directory: Path) -> None:
    params = SamplingParams(
        max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=-1, prompt_logprobs=-1,
        detokenize=False,
    )  # fmt: skip
    with LLM(str(directory), max_model_len=128) as llm:
        (output,) = llm.generate([[1, 2, 3]], params)
        with pytest.raises(InvalidInputError):
            llm.generate([[1]], params.clone(logprobs=TINY.vocab + 1))
    assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
    for entry in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs):
        assert {token for token, _ in entry.top} == set(range(TINY.vocab))
        assert np.exp([value for _, value in entry.top]).sum() == pytest.approx(1, abs=1e-4)


def test_named_tokens_need_logprobs() -> None:
    with pytest.raises(InvalidInputError):
        SamplingParams(logprob_token_ids=[1])


def test_step_respects_max_scored_tokens() -> None:
    """The prompt logprobs of a step are limited; decoding continues."""
    engine = make_engine(max_num_batched_tokens=64)
    scheduler = engine.core.scheduler
    limit = scheduler.builder.config.max_prompt_logprob_tokens
    object.__setattr__(scheduler.builder.config, "max_prompt_logprob_tokens", 10)
    adapter, marked = adapter_of(engine), []
    adapter.on_forward = lambda step: marked.append(int(step.logits_mask.sum()))
    try:
        engine.submit(list(range(1, 20)), greedy(30))
        for start in range(5):
            engine.submit(list(range(start + 1, start + 51)), greedy(2, prompt_logprobs=0))
        finished = run_all(engine)
    finally:
        object.__setattr__(scheduler.builder.config, "max_prompt_logprob_tokens", limit)
    assert len(finished) == 6 and max(marked) <= 10 + 6
    for output in finished.values():
        if output.prompt_logprobs is not None:
            assert [e.token_id for e in output.prompt_logprobs] == output.prompt_token_ids
    engine.close()


def test_choices_share_the_prompt_logprobs() -> None:
    engine = make_engine()
    name = engine.submit([5, 6, 7, 8, 9, 10], greedy(3, n=3, prompt_logprobs=1))
    output = run_all(engine)[name]
    assert len(output.outputs) == 3 and output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 6
    engine.close()
