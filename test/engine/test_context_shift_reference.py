"""Ten contexts of output of a real model are bitwise identical to the SLOT layout of the C API,
where seq_rm and seq_add shift the context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import tiny_config, write_hf_model
from reference_models import opened

from llaisys import LLM, SamplingParams
from llaisys.common.step import ModelStepInput, SamplingMetadata
from llaisys.models.native import NativeAdapter

CONTEXT = 48
BLOCK = 4
COUNT = 10 * CONTEXT
PROMPT = [7, 8, 9, 200, 31, 5, 77, 150, 12, 13, 14]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shift") / "model"
    config = tiny_config(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=2)
    write_hf_model(path, config, tokenizer=False)
    return path


def open_llm(model: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "max_num_seqs": 4, "num_kv_blocks": 64, "block_size": BLOCK, "max_model_len": CONTEXT,
        "context_shift": True, "n_threads": 1,
    }  # fmt: skip
    return LLM(model=str(model), **{**defaults, **options})


def slot_reference(
    adapter: NativeAdapter, prompt: list[int], count: int, keep: int, seed: int | None
) -> tuple[list[int], list[float]]:
    """Return tokens and logprobs of the SLOT layout of the C API."""
    native, sampled, logprobs = adapter.native, [], []
    fresh, position = list(prompt), 0
    dropped = (CONTEXT - keep) // 2 // BLOCK * BLOCK
    for index in range(count):
        if position == CONTEXT:
            native.call("KvSeqRm", 0, keep, keep + dropped)
            native.call("KvSeqAdd", 0, keep + dropped, -1, -dropped)
            position -= dropped
        n = len(fresh)
        marks = np.zeros(n, np.int8)
        marks[-1] = 1
        positions = np.arange(position, position + n, dtype=np.int64)
        step = ModelStepInput(np.array(fresh, np.int64), positions, np.zeros(n, np.int64), marks)
        adapter.forward(step, None)
        position += n
        numbers = {
            "temperature": np.array([0.0 if seed is None else 0.8], np.float64),
            "n_logprobs": np.zeros(1, np.float64),
        }
        sampling = SamplingMetadata(
            np.zeros(1, np.int32),
            seeds=np.array([seed or 0], np.uint64),
            positions=np.array([len(prompt) + index], np.int64),  # of all tokens, not of the cache
            choices=np.zeros(1, np.int32),
            numbers=numbers,
        )
        token = int(adapter.sample(sampling)[0])
        found = adapter.logprobs(0)
        assert found is not None
        sampled.append(token)
        logprobs.append(found.logprob)
        fresh = [token]
    return sampled, logprobs


def sampling_of(count: int, keep: int, seed: int | None) -> SamplingParams:
    temperature = 0.0 if seed is None else 0.8
    return SamplingParams(
        max_tokens=count, ignore_eos=True, n_keep=keep, logprobs=0, seed=seed,
        temperature=temperature,
    )  # fmt: skip


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "f16", "q8"])
@pytest.mark.parametrize(("keep", "seed"), [(0, None), (6, 11)])
def test_ten_contexts_are_bitwise_identical_to_the_c_api(
    model: Path, kv_dtype: str, keep: int, seed: int | None
):
    with opened(
        model, kv_cache_layout="slot", max_model_len=CONTEXT, kv_cache_dtype=kv_dtype, n_threads=1
    ) as adapter:
        tokens, logprobs = slot_reference(adapter, PROMPT, COUNT, keep, seed)
    with open_llm(model, kv_cache_dtype=kv_dtype) as llm:
        output = llm.generate(PROMPT, sampling_of(COUNT, keep, seed))[0].outputs[0]
    assert output.token_ids == tokens
    assert output.logprobs is not None
    assert [entry.logprob for entry in output.logprobs] == logprobs
    assert len(set(tokens)) > 5  # not one token over and over


def test_batch_and_preemption_do_not_change_results(model: Path):
    params = [sampling_of(3 * CONTEXT, keep, keep) for keep in (0, 3, 9)]
    prompts = [PROMPT, PROMPT[:4], PROMPT * 3]
    with open_llm(model) as llm:
        alone = [llm.generate(p, s)[0].outputs[0] for p, s in zip(prompts, params, strict=True)]
    # Three contexts have 36 blocks: they push each other out again and again.
    with open_llm(model, num_kv_blocks=17, max_num_batched_tokens=16) as llm:
        crowd = [output.outputs[0] for output in llm.generate(prompts, params)]
        assert llm.stats()["num_preemptions"] > 0
    for one, other in zip(alone, crowd, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_ranks_shift_together(model: Path, backend: str):
    params = sampling_of(3 * CONTEXT, 5, None)
    with open_llm(model) as llm:
        wanted = llm.generate([PROMPT, PROMPT[:3]], params)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": backend}
    with open_llm(model, **options) as llm:
        found = llm.generate([PROMPT, PROMPT[:3]], params)
    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
