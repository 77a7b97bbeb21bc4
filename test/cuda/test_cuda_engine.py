"""The engine on the GPU: tokens match the CPU and a second run."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_helpers import PROMPTS, matching, shape, tokens
from model_files import tiny_config, write_hf_model

from llaisys import LLM, SamplingParams


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("cuda-model")
    write_hf_model(path, shape("float32"))
    return path


def test_f32_tokens_match_cpu(directory: Path) -> None:
    assert tokens(directory, "cuda", "f32") == tokens(directory, "cpu", "f32")


def test_chunked_prefill_keeps_tokens(directory: Path) -> None:
    whole = tokens(directory, "cuda", "f32")
    assert tokens(directory, "cuda", "f32", max_num_batched_tokens=37, max_num_seqs=3) == whole


@pytest.mark.parametrize("rows", [40, 90, 2048])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_16_bit_tokens_mostly_match_cpu(directory: Path, dtype: str, rows: int) -> None:
    """Only the GPU rounds activations: tokens may differ where two logits are close."""
    ours = tokens(directory, "cuda", dtype, max_num_batched_tokens=rows, max_num_seqs=8)
    reference = tokens(directory, "cpu", dtype)
    assert matching(ours, reference) >= 0.5, (ours, reference)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_long_prompt_matches_chunked_prefill(
    tmp_path_factory: pytest.TempPathFactory, dtype: str
) -> None:
    """Enough rows for the fused SwiGLU GEMM; the chunks have too few."""
    path = tmp_path_factory.mktemp("cuda-wide-model")
    write_hf_model(path, {**shape("float32"), "intermediate_size": 4992})
    prompt = [[(i * 389) % 997 for i in range(500)]]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
    found = []
    for rows in (2048, 100):
        with LLM(str(path), device="cuda", dtype=dtype, max_num_batched_tokens=rows,
                 max_num_seqs=8, num_kv_blocks=200) as llm:  # fmt: skip
            found.append(llm.generate(prompt, params)[0].token_ids)
    same = [a == b for a, b in zip(*found, strict=True)]
    assert all(same[:3]), found  # tokens may differ where two logits are close


@pytest.mark.parametrize("rows", [5, 90, 2048])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_qk_norm_tokens_mostly_match_cpu(
    tmp_path_factory: pytest.TempPathFactory, head_dim: int, rows: int
) -> None:
    """Qwen3: the fused RoPE kernel applies the norms for every number of rows."""
    path = tmp_path_factory.mktemp("cuda-qk-norm")
    config = tiny_config(
        "qwen3", hidden_size=256, num_attention_heads=6, head_dim=head_dim, intermediate_size=360,
        vocab_size=1000, num_hidden_layers=3, max_position_embeddings=1024,
    )  # fmt: skip
    write_hf_model(path, config)
    limits = {"max_num_batched_tokens": rows, "max_num_seqs": min(rows, 8)}
    assert matching(tokens(path, "cuda", "bf16", **limits), tokens(path, "cpu", "bf16")) >= 0.5
    assert tokens(path, "cuda", "f32", **limits) == tokens(path, "cpu", "f32")


@pytest.mark.parametrize("head_dim", [80, 96, 256])
def test_head_dims_mostly_match_cpu(
    tmp_path_factory: pytest.TempPathFactory, head_dim: int
) -> None:
    path = tmp_path_factory.mktemp("cuda-head-dim")
    write_hf_model(path, {**shape("float32"), "head_dim": head_dim})
    assert matching(tokens(path, "cuda", "bf16"), tokens(path, "cpu", "bf16")) >= 0.5


def test_long_sequences_beside_short_ones_mostly_match_cpu(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Decoding crosses the length from which a sequence is split over several clusters."""
    path = tmp_path_factory.mktemp("cuda-long")
    write_hf_model(path, {**shape("float32"), "max_position_embeddings": 8192})
    prompts = [[(i * 389 + n) % 997 for i in range(n)] for n in (4088, 20, 5000, 300)]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    found = {}
    for device in ("cpu", "cuda"):
        with LLM(str(path), device=device, dtype="bf16", num_kv_blocks=700) as llm:
            found[device] = [output.token_ids for output in llm.generate(prompts, params)]
    assert matching(found["cuda"], found["cpu"]) >= 0.5, found


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_second_run_gives_the_same_tokens(directory: Path, dtype: str) -> None:
    assert tokens(directory, "cuda", dtype) == tokens(directory, "cuda", dtype)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_device_side_tokens_are_the_same(directory: Path, dtype: str) -> None:
    steps = {on: tokens(directory, "cuda", dtype, async_scheduling=on) for on in ("on", "off")}
    assert steps["on"] == steps["off"]


def test_seeded_top_k_samples_match_cpu(directory: Path) -> None:
    params = SamplingParams(
        max_tokens=16, temperature=0.8, top_k=50, top_p=0.9, seed=7, ignore_eos=True,
        detokenize=False,
    )  # fmt: skip
    sampled = {}
    for device in ("cpu", "cuda"):
        with LLM(str(directory), device=device, dtype="f32", num_kv_blocks=200) as llm:
            sampled[device] = [output.token_ids for output in llm.generate(PROMPTS, params)]
    assert sampled["cuda"] == sampled["cpu"]


def test_seeded_samples_match_cpu(directory: Path) -> None:
    params = SamplingParams(
        max_tokens=16, temperature=0.8, top_k=50, top_p=0.9, seed=7, ignore_eos=True,
        repetition_penalty=1.1, detokenize=False,
    )  # fmt: skip
    sampled = {}
    for device in ("cpu", "cuda"):
        with LLM(str(directory), device=device, dtype="f32", num_kv_blocks=200) as llm:
            sampled[device] = [output.token_ids for output in llm.generate(PROMPTS, params)]
    assert sampled["cuda"] == sampled["cpu"]
