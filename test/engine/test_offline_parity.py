"""The whole engine against transformers: many requests at once, chunked prompts, tiny pools."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference_models import Tiny, make_reference, random_tokens, save

from llaisys import LLM, SamplingParams

pytestmark = pytest.mark.parity

TINY = Tiny(layers=2)
NEW_TOKENS = 20
LENGTHS = (1, 5, 16, 17, 40, 64, 90, 33)
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_reference(TINY, seed=1), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model = make_reference(TINY, seed=1)
    answers = []
    for length in LENGTHS:
        prompt = torch.tensor([random_tokens(length, TINY.vocab, seed=length)])
        full = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
        answers.append(full[0].tolist()[length:])
    return answers


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="default"),
        pytest.param({"max_num_batched_tokens": 16, "max_num_seqs": 16}, id="chunked"),
        pytest.param({"num_kv_blocks": 9}, id="tiny-pool"),
        pytest.param({"max_num_seqs": 1}, id="one-at-a-time"),
        pytest.param({"enable_prefix_caching": False}, id="no-prefix-cache"),
        pytest.param({"n_threads": 1}, id="one-thread"),
    ],
)
def test_greedy_answers_equal_transformers(
    directory: Path, expected: list[list[int]], options: dict[str, int]
) -> None:
    prompts = [random_tokens(length, TINY.vocab, seed=length) for length in LENGTHS]
    with LLM(str(directory), max_model_len=128, **options) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(prompts, GREEDY)
        again = llm.generate(prompts, GREEDY)  # now from the prefix cache, where there is one
    assert [output.token_ids for output in outputs] == expected
    assert [output.token_ids for output in again] == expected


def test_seeded_request_is_the_same_alone_batched_and_after_preemption(
    directory: Path,
) -> None:
    params = SamplingParams(
        max_tokens=30, temperature=0.9, top_p=0.95, seed=42, ignore_eos=True, detokenize=False
    )
    prompts = [random_tokens(length, TINY.vocab, seed=length) for length in LENGTHS]
    with LLM(str(directory), max_model_len=128) as llm:
        alone = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    with LLM(str(directory), max_model_len=128, num_kv_blocks=10) as llm:
        together = [output.token_ids for output in llm.generate(prompts, params)]
        assert llm.stats()["num_preemptions"] > 0
    assert together == alone
