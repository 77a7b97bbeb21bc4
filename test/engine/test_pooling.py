"""Embeddings equal transformers, do not depend on the batch, and are released."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fakes import adapter_of, greedy, hidden_of, make_engine, run_all
from error_helpers import invalid_input
from reference_models import Tiny, make_reference, random_tokens, reference_hidden, save

from llaisys import LLM, SamplingParams
from llaisys.common.embedding import pooling_params

TINY = Tiny(layers=2, intermediate=102)
LENGTHS = (1, 2, 5, 16, 17, 40, 90, 33)
PROMPTS = [random_tokens(length, TINY.vocab, seed=length) for length in LENGTHS]
SETUPS = {
    "default": {},
    "chunked": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "tiny-pool": {"num_kv_blocks": 9},
    "no-prefix-cache": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return make_reference(TINY, seed=1)


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[str, list[Any]]:
    """Normalized embeddings of each prompt by pooling method."""
    states = [reference_hidden(model, prompt).astype(np.float64) for prompt in PROMPTS]
    found = {"last": [s[-1] for s in states], "mean": [s.mean(axis=0) for s in states]}
    return {how: [v / np.linalg.norm(v) for v in vectors] for how, vectors in found.items()}


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[str, list[list[float]]]:
    """One prompt at a time without a cached prefix."""
    found: dict[str, list[list[float]]] = {}
    with LLM(str(directory), max_model_len=128, enable_prefix_caching=False) as llm:
        for how in ("last", "mean"):
            found[how] = [llm.embed([p], pooling=how)[0].embedding for p in PROMPTS]
    return found


@pytest.mark.parity
@pytest.mark.parametrize("how", ["last", "mean"])
def test_embeddings_equal_transformers(
    alone: dict[str, list[list[float]]], expected: dict[str, list[Any]], how: str
) -> None:
    for vector, reference in zip(alone[how], expected[how], strict=True):
        assert vector == pytest.approx(reference.tolist(), abs=2e-6)


@pytest.mark.parity
@pytest.mark.parametrize("options", SETUPS.values(), ids=list(SETUPS))
def test_results_do_not_depend_on_batch_chunks_prefixes_or_preemptions(
    directory: Path, alone: dict[str, list[list[float]]], options: dict[str, Any]
) -> None:
    with LLM(str(directory), max_model_len=128, **options) as llm:
        for _ in range(2):  # the second time there are prefixes
            found = {how: [o.embedding for o in llm.embed(PROMPTS, pooling=how)] for how in alone}
            assert found == alone
        mixed = [pooling_params("mean" if i % 2 else "last") for i in range(len(PROMPTS))]
        sampled = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, detokenize=False)
        before = [out.token_ids for out in llm.generate(PROMPTS, sampled)]
        together = llm.generate([*PROMPTS, *PROMPTS], [*mixed, *[sampled] * len(PROMPTS)])
        assert [out.token_ids for out in together[len(PROMPTS) :]] == before
        again = [llm.generate([p], m)[0].pooled for p, m in zip(PROMPTS, mixed, strict=True)]
        assert [out.pooled for out in together[: len(PROMPTS)]] == again


@pytest.mark.parity
@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_two_ranks_return_the_same_embeddings(
    directory: Path, expected: dict[str, list[Any]], backend: str
) -> None:
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": backend}
    with LLM(str(directory), max_model_len=128, pooling="mean", **options) as llm:
        for output, reference in zip(llm.embed(PROMPTS), expected["mean"], strict=True):
            assert output.embedding == pytest.approx(reference.tolist(), abs=2e-6)


@pytest.mark.parity
def test_only_the_last_token_may_use_the_prefix_cache(directory: Path) -> None:
    prompt = random_tokens(64, TINY.vocab, seed=3)
    with LLM(str(directory), max_model_len=64) as llm:
        (first,) = llm.embed(prompt)
        (second,) = llm.embed(prompt)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
        (mean,) = llm.embed(prompt, pooling="mean")
        assert mean.num_cached_tokens == 0 and first.embedding == second.embedding
        with invalid_input("prompt"):
            llm.embed([[*prompt, 1]])


@pytest.mark.parity
def test_dimensions_are_truncated_before_normalization(directory: Path) -> None:
    with LLM(str(directory), max_model_len=128) as llm:
        (plain,) = llm.embed(PROMPTS[3], normalize=False)
        (short,) = llm.embed(PROMPTS[3], dimensions=7)
        length = math.sqrt(math.fsum(value * value for value in plain.embedding[:7]))
        wanted = [value / length for value in plain.embedding[:7]]
        assert short.embedding == pytest.approx(wanted, rel=1e-6)
        for dimensions in (0, 61, "x"):
            with invalid_input("dimensions"):
                llm.embed(PROMPTS[3], dimensions=dimensions)  # type: ignore[arg-type]
        with invalid_input("pooling"):
            llm.embed(PROMPTS[3], pooling="max")


@pytest.mark.parity
def test_scores_are_cosine_similarities(
    directory: Path, alone: dict[str, list[list[float]]]
) -> None:
    vectors = alone["last"]
    cosines = [math.fsum(a * b for a, b in zip(vectors[0], v, strict=True)) for v in vectors]
    with LLM(str(directory), max_model_len=128) as llm:
        assert llm.score([PROMPTS[0]], PROMPTS) == pytest.approx(cosines, abs=1e-6)
        assert llm.score(PROMPTS[:3], PROMPTS[:3]) == pytest.approx([1.0] * 3, abs=1e-6)
        with invalid_input("text_1"):
            llm.score(PROMPTS[:2], PROMPTS[:3])


# ---- with a fake model ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["last", "mean"])
def test_prompt_logprobs_of_chunked_and_preempted_prompts_are_complete(how: str) -> None:
    engine = make_engine(num_blocks=20, max_num_seqs=8, max_num_batched_tokens=16)
    prompts = [list(range(start + 1, start + 31)) for start in range(0, 60, 10)]
    names = [engine.submit(prompt, pooling_params(how)) for prompt in prompts]
    for start in range(3):
        engine.submit([start + 1, start + 2], greedy(40))
    outputs = run_all(engine)
    for name, prompt in zip(names, prompts, strict=True):
        states = [hidden_of(token) for token in (prompt if how == "mean" else prompt[-1:])]
        pooled = outputs[name].pooled
        assert pooled is not None
        wanted = np.mean(states, axis=0)
        np.testing.assert_allclose(np.frombuffer(pooled, np.float32), wanted, atol=1e-6)
        assert outputs[name].finish_reason == "length"
    engine.submit([1, 2], greedy(1))  # releases the sequences on the worker
    run_all(engine)
    assert adapter_of(engine).pools == {}


def test_pooling_with_max_tokens_is_rejected() -> None:
    for wrong in ({}, {"max_tokens": 1}, {"max_tokens": 0, "n": 2}):
        with invalid_input("pooling"):
            SamplingParams(pooling="mean", **wrong)
    params = pooling_params("mean")
    assert SamplingParams.from_wire(params.to_wire()) == params
