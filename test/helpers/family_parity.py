"""Checks of a family that hold for every model of it, against transformers or the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from reference_models import BLOCK, Piece, opened, random_tokens, reference_logits, run_block

from llaisys import LLM, SamplingParams

# As close as f32 sums in another order: relative to the largest logit.
TOLERANCE = 1e-4


def check_logits(got: Any, expected: Any) -> None:
    largest = float(np.abs(expected).max())
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * largest)


def check_prompts_chunks_and_batches(model: Any, directory: Path, vocab: int) -> None:
    """The logits of a prompt, of chunks of two sequences in one step, and of single tokens."""
    first, second = random_tokens(41, vocab, 1), random_tokens(23, vocab, 2)
    expected = reference_logits(model, first), reference_logits(model, second)
    blocks = {0: [0, 1, 2], 1: [5, 3]}
    with opened(directory, kv_cache_capacity_tokens=8 * BLOCK, max_model_len=60) as adapter:
        check_logits(run_block(adapter, [Piece(0, first)], blocks), expected[0])
    with opened(directory, kv_cache_capacity_tokens=8 * BLOCK, max_model_len=60) as adapter:
        step = run_block(adapter, [Piece(0, first[:19]), Piece(1, second[:7])], blocks)
        check_logits(step, np.concatenate([expected[0][:19], expected[1][:7]]))
        step = run_block(adapter, [Piece(1, second[7:22], 7), Piece(0, first[19:20], 19)], blocks)
        check_logits(step, np.concatenate([expected[1][7:22], expected[0][19:20]]))
        step = run_block(adapter, [Piece(0, first[20:21], 20), Piece(1, second[22:], 22)], blocks)
        check_logits(step, np.concatenate([expected[0][20:21], expected[1][22:]]))


def best_tokens(model: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    """What transformers chooses for each of `tokens` after the ones before it: equal to `tokens` if
    and only if it generates them, in one pass instead of one for each."""
    logits = reference_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :]
    best: list[int] = logits.argmax(axis=1).tolist()
    return best


def check_greedy_tokens(model: Any, directory: Path, vocab: int, n: int) -> None:
    """Batched, from the prefix cache, and alone."""
    prompts = [random_tokens(length, vocab, length) for length in (5, 33, 18)]
    prompts.append([*prompts[1][:32], 7])  # shares two blocks with another prompt
    params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
    with LLM(
        str(directory), max_model_len=33 + n, max_num_batched_tokens=16, max_num_seqs=16
    ) as llm:
        found = [out.token_ids for out in llm.generate(prompts, params)]
        cached = llm.generate(prompts, params)
        assert [out.token_ids for out in cached] == found
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
        assert [out.token_ids for out in alone] == found
    for prompt, tokens in zip(prompts, found, strict=True):
        assert best_tokens(model, prompt, list(tokens)) == list(tokens)


def chunked_cuda_logits(directory: Path, tokens: list[int], dtype: str, **options: Any) -> Any:
    """The logits of 41 tokens on the GPU: two chunks and a single token."""
    size = {"kv_cache_capacity_tokens": 4 * BLOCK, "max_model_len": 60}
    with opened(directory, device="cuda", dtype=dtype, **size, **options) as adapter:
        blocks = {0: [2, 0, 1]}
        found = [
            run_block(adapter, [Piece(0, tokens[:23])], blocks),
            run_block(adapter, [Piece(0, tokens[23:40], 23)], blocks),
            run_block(adapter, [Piece(0, tokens[40:], 40)], blocks),
        ]
    return np.concatenate(found)


def check_cuda_greedy_tokens(directory: Path, vocab: int) -> None:
    """As on the CPU, in captured graphs and from the prefix cache."""
    prompts = [random_tokens(length, vocab, length) for length in (5, 33, 18)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    found = []
    for device in ("cpu", "cuda"):
        with LLM(str(directory), device=device, max_model_len=64, num_kv_blocks=40) as llm:
            first = [output.token_ids for output in llm.generate(prompts, params)]
            again = [output.token_ids for output in llm.generate(prompts, params)]
            assert again == first
            found.append(first)
    assert found[0] == found[1]
