"""KV offload on the GPU: prefixes restored from pinned memory give the same tokens and logprobs;
too large pools are rejected with byte counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from error_helpers import invalid_input, naming
from model_files import tiny_config, write_hf_model

from llaisys import LLM, SamplingParams
from llaisys.common.errors import LlaisysError

DEVICE = "cuda"
# Longer than two blocks; the last shape has blocks that are not a multiple of 16 bytes.
SHAPES = [(64, 16, "bf16"), (64, 16, "f32"), (128, 16, "f16"), (10, 1, "f16")]
PROMPTS = [[(7 * i + 31 * p) % 900 + 3 for i in range(45 + p)] for p in range(3)]
PARAMS = SamplingParams(
    max_tokens=6, ignore_eos=True, temperature=0.7, seed=3, logprobs=2, detokenize=False
)


def write(path: Path, head_dim: int, **changes: Any) -> Path:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1}
    config = tiny_config(**sizes, head_dim=head_dim, vocab_size=1000, **changes)
    write_hf_model(path, config, tokenizer=False)
    return path


def ask(llm: LLM, prompt: list[int]) -> tuple[list[int], Any, int, int]:
    output = llm.generate(prompt, PARAMS)[0]
    choice, usage = output.outputs[0], output.usage
    return choice.token_ids, choice.logprobs, usage.cached_tokens, usage.host_cached_tokens


@pytest.mark.parametrize(("head_dim", "block_size", "dtype"), SHAPES)
@pytest.mark.parametrize("async_scheduling", ["off", "on"])
def test_offloaded_prefix_has_the_same_bits(
    tmp_path: Path, head_dim: int, block_size: int, dtype: str, async_scheduling: str
) -> None:
    model = write(tmp_path, head_dim)
    options: dict[str, Any] = {
        "device": DEVICE, "dtype": dtype, "block_size": block_size, "max_num_seqs": 2,
        "async_scheduling": async_scheduling,
    }  # fmt: skip
    room = -(-53 // block_size)  # blocks of one prompt and its answer
    with LLM(str(model), **options, num_kv_blocks=4 * room) as llm:
        for prompt in PROMPTS:
            ask(llm, prompt)
        kept = [ask(llm, prompt) for prompt in PROMPTS]
    with LLM(str(model), **options, num_kv_blocks=room, kv_offload="16MiB") as llm:
        for prompt in PROMPTS:
            assert ask(llm, prompt)[2:] == (0, 0)
        for prompt, (tokens, logprobs, cached, _) in zip(PROMPTS, kept, strict=True):
            assert cached == (len(prompt) - 1) // block_size * block_size
            assert ask(llm, prompt) == (tokens, logprobs, cached, cached)


def test_too_much_pinned_memory_is_rejected_with_byte_counts(tmp_path: Path) -> None:
    model = write(tmp_path, 64)
    with invalid_input("kv_offload"):
        LLM(str(model), device=DEVICE, num_kv_blocks=40, kv_offload="900TiB")


def test_too_large_kv_pool_reports_requested_and_free_bytes(
    tmp_path: Path,
) -> None:
    """`num_kv_blocks` is not reduced; the allocation fails."""
    model = write(tmp_path, 128, num_hidden_layers=24)
    with naming(LlaisysError, "GPU 0"):
        LLM(str(model), device=DEVICE, dtype="f32", num_kv_blocks=1 << 21)
    with LLM(str(model), device=DEVICE, dtype="f32", num_kv_blocks=40) as llm:  # no memory leaked
        assert len(ask(llm, [1, 2])[0]) == 6
