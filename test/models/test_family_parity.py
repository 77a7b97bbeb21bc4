"""Every dense family against transformers: logits, greedy tokens, batches, chunks and the prefix
cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_helpers import naming
from family_gguf import write_family_gguf
from family_models import MODELS, VOCAB, make_model
from family_parity import (
    check_greedy_tokens,
    check_logits,
    check_prompts_chunks_and_batches,
)
from reference_models import BLOCK, Piece, opened, random_tokens, reference_logits, run_block, save

from llaisys import LLM, SamplingParams
from llaisys.common.errors import InvalidInputError

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A transformers model and its directory."""
    model = make_model(request.param)
    return model, save(model, tmp_path_factory.mktemp(request.param))


def test_logits_of_prompts_chunks_and_batches(pair: tuple[Any, Path]) -> None:
    check_prompts_chunks_and_batches(*pair, VOCAB)


def test_greedy_tokens_alone_batched_and_with_prefix_cache(pair: tuple[Any, Path]) -> None:
    # At most 57 tokens: transformers changes to other LongRoPE factors above the original context
    # of 64.
    check_greedy_tokens(*pair, VOCAB, 24)


def test_longrope_of_a_context_above_the_original(tmp_path: Path) -> None:
    model = make_model("phi4-longrope")
    directory = save(model, tmp_path)
    tokens = random_tokens(90, VOCAB)  # transformers chooses the long factors above 64
    blocks = {0: list(range(6))}
    with opened(directory, kv_cache_capacity_tokens=8 * BLOCK, max_model_len=128) as adapter:
        check_logits(
            run_block(adapter, [Piece(0, tokens)], blocks), reference_logits(model, tokens)
        )


# name in MODELS -> architecture of the GGUF file
ARCHITECTURES = {
    "phi3": "phi3",
    "phi4-longrope": "phi3",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
    "glm4": "glm4",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "exaone4": "exaone4",
    "ernie4_5": "ernie4_5",
    "olmo3": "olmo2",
    "seed_oss": "seed_oss",
    "glm": "chatglm",
}
# Rows of whole Q8_0 blocks. llama.cpp derives the attention scale of Gemma from the head size.
GGUF_SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 160}
GGUF_CHANGES = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "cohere2": {"head_dim": 16},
}

GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_q8_0_gguf_file_equals_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(name, **GGUF_SIZES, **GGUF_CHANGES.get(name, {}))
    if name == "gemma3":  # the RoPE base of layers with a window is not in the metadata
        model = make_model(name, **GGUF_SIZES, **GGUF_CHANGES[name], rope_parameters=GEMMA3_ROPE)
    path = tmp_path / "model.gguf"
    write_family_gguf(model, path, ARCHITECTURES[name])
    tokens = random_tokens(37, 160)
    expected = reference_logits(model, tokens)
    blocks = {0: [0, 1, 2]}
    with opened(path, kv_cache_capacity_tokens=4 * BLOCK, max_model_len=60, dtype="f32") as adapter:
        check_logits(run_block(adapter, [Piece(0, tokens)], blocks), expected)
    with opened(path, kv_cache_capacity_tokens=4 * BLOCK, max_model_len=60) as adapter:
        # Blocks as stored: products round activations to 8 bits.
        got = run_block(adapter, [Piece(0, tokens)], blocks)
        difference = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert difference < 0.1


@pytest.mark.parametrize("name", ["cohere2", "gemma2", "starcoder2", "phi4-longrope"])
def test_two_ranks_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    """Fused, reordered and biased tensors are sharded by heads and columns."""
    directory = save(make_model(name), tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    found = []
    for ranks in (1, 2):
        with LLM(str(directory), max_model_len=64, tensor_parallel_size=ranks) as llm:
            found.append(llm.generate([random_tokens(21, VOCAB)], params)[0].token_ids)
    assert found[0] == found[1]


def test_norms_of_whole_rows_reject_tensor_parallelism(tmp_path: Path) -> None:
    directory = save(make_model("olmo2"), tmp_path)
    with naming(InvalidInputError, "has_row_norms"):
        LLM(str(directory), max_model_len=64, tensor_parallel_size=2)
