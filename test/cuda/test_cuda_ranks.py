"""Ranks that share a GPU, tensor-parallel and pipeline stages: the same tokens as one rank, and
failures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from error_helpers import naming
from model_files import tiny_config, write_hf_model

from llaisys import LLM, SamplingParams
from llaisys.common.errors import LlaisysError

PROMPTS = [[5, 9, 2, 77, 31], list(range(3, 90)), [11] * 33, [8], list(range(200, 17, -1))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads for four ranks; head_dim 64 takes the fast kernels in 16 bits."""
    path: Path = tmp_path_factory.mktemp("cuda-ranks")
    config = tiny_config(
        hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        intermediate_size=512, vocab_size=1000, num_hidden_layers=3, torch_dtype="float32",
        max_position_embeddings=1024,
    )  # fmt: skip
    write_hf_model(path, config, tokenizer=False)
    return path


def open_llm(model: Path, ranks: int, **changes: Any) -> LLM:
    options: dict[str, Any] = {"device": "cuda", "dtype": "f32", "num_kv_blocks": 200}
    if ranks > 1:
        options |= {
            "tensor_parallel_size": ranks,
            "tensor_parallel_device_ids": (0,) * ranks,
            "distributed_executor_backend": "mp",
        }
    return LLM(str(model), **(options | changes))


def params() -> list[SamplingParams]:
    """Greedy and seeded."""
    seeded = {"temperature": 0.9, "top_k": 20, "seed": 5, "repetition_penalty": 1.2}
    return [
        SamplingParams(
            max_tokens=16 + i,
            ignore_eos=True,
            detokenize=False,
            **({"temperature": 0.0}, seeded)[i % 2],
        )
        for i in range(len(PROMPTS))
    ]


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params())]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_one_gpu_give_the_same_tokens(directory: Path, ranks: int) -> None:
    """Twice: the second time from the prefix cache. Decode steps are captured graphs."""
    with open_llm(directory, 1) as llm:
        expected = tokens(llm)
    with open_llm(directory, ranks) as llm:
        assert tokens(llm) == expected
        assert tokens(llm) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bf16"},
        {"dtype": "bf16", "quantization": "fp8"},
        {"vocab_parallel_head": False},
        {"max_num_batched_tokens": 37, "max_num_seqs": 3},
        {"speculative_config": {"prompt_lookup_min": 1, "num_speculative_tokens": 3}},
    ],
    ids=["bf16", "fp8", "whole-head", "chunks", "drafts"],
)
def test_two_ranks_with_other_options(directory: Path, changes: dict[str, Any]) -> None:
    """In 16 bits tokens may differ where two logits are close: sums are rounded once more."""
    with open_llm(directory, 1, **changes) as llm:
        expected = tokens(llm)
    with open_llm(directory, 2, **changes) as llm:
        found = tokens(llm)
    if "dtype" not in changes:
        assert found == expected
    assert [len(ids) for ids in found] == [len(ids) for ids in expected]
    firsts = [a[0] == b[0] for a, b in zip(found, expected, strict=True)]
    assert sum(firsts) >= 4, (found, expected)


def test_killed_rank_ends_the_engine(directory: Path) -> None:
    with open_llm(directory, 2) as llm:
        tokens(llm)
        executor: Any = llm.llm_engine.core.executor
        executor.children[0].popen.kill()
        start = time.monotonic()
        with naming(LlaisysError, "rank 1", "-9"):
            tokens(llm)
        assert time.monotonic() - start < 30


def test_ray_actors_on_one_gpu_give_the_same_tokens(directory: Path) -> None:
    """Each reserves half of the GPU. A killed actor ends the engine."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'llaisys[ray]'")
    with open_llm(directory, 1) as llm:
        expected = tokens(llm)
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        with open_llm(directory, 2, distributed_executor_backend="ray", n_threads=1) as llm:
            assert ray.available_resources().get("GPU", 0) == 0
            assert tokens(llm) == expected
            assert tokens(llm) == expected
            executor: Any = llm.llm_engine.core.executor
            ray.kill(executor.children[0].actor)
            start = time.monotonic()
            with pytest.raises(LlaisysError):
                tokens(llm)
            assert time.monotonic() - start < 30
    finally:
        ray.shutdown()


def stage_options(stages: int, tp_size: int = 1) -> dict[str, Any]:
    return {
        "pipeline_parallel_size": stages,
        "tensor_parallel_size": tp_size,
        "tensor_parallel_device_ids": (0,) * stages * tp_size,
        "distributed_executor_backend": "mp",
        "max_num_seqs": 4,
    }


@pytest.mark.parametrize(
    ("stages", "tp_size", "changes"),
    [
        (2, 1, {}),
        (3, 1, {"max_num_batched_tokens": 37}),
        (2, 2, {}),
        (2, 1, {"dtype": "bf16", "exact": True}),
    ],
    ids=["two", "three in chunks", "two of two ranks", "bf16"],
)
def test_stages_on_one_gpu_give_the_same_tokens(
    directory: Path, stages: int, tp_size: int, changes: dict[str, Any]
) -> None:
    """Twice: the second time from the prefix cache. Decode steps are captured graphs."""
    with open_llm(directory, 1, max_num_seqs=4, **changes) as llm:
        expected = tokens(llm)
    with open_llm(directory, 1, **stage_options(stages, tp_size), **changes) as llm:
        assert tokens(llm) == expected
        assert tokens(llm) == expected


def test_killed_stage_ends_the_engine(directory: Path) -> None:
    with open_llm(directory, 1, **stage_options(2)) as llm:
        tokens(llm)
        executor: Any = llm.llm_engine.core.executor
        executor.children[0].popen.kill()
        start = time.monotonic()
        with naming(LlaisysError, "rank 1", "-9"):
            tokens(llm)
        assert time.monotonic() - start < 30
