"""LoRA adapters in the engine on the GPU: equal to the CPU, with graphs, slots and others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lora_files import ALL, MLP, Lora
from model_files import tiny_config, write_hf_model

from llaisys import LLM, SamplingParams

CONFIG = tiny_config(
    hidden_size=256, num_attention_heads=6, num_key_value_heads=2, head_dim=64,
    intermediate_size=360, vocab_size=1000, num_hidden_layers=3, max_position_embeddings=1024,
)  # fmt: skip
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda-lora")
    write_hf_model(folder / "base", CONFIG)
    for number, rank in enumerate((1, 8, 16, 64, 256, 16)):
        lora = Lora(CONFIG, rank, MLP if number == 2 else ALL, seed=number)
        lora.write_peft(folder / f"a{number}")
    return folder


FUSED = (0, 1, 2, 3, 5)  # ranks of up to 64


def run(
    folder: Path, device: str, dtype: str = "f32", adapters: Sequence[int] = range(6), **more: Any
) -> list[list[int]]:
    rng = random.Random(3)
    names = [*[f"a{i}" for i in adapters], None]
    work = [
        ([rng.randrange(3, 900) for _ in range(rng.randrange(1, 60))], rng.choice(names))
        for _ in range(24)
    ]
    modules = {f"a{i}": str(folder / f"a{i}") for i in adapters}
    with LLM(
        str(folder / "base"), device=device, dtype=dtype, num_kv_blocks=400, lora_modules=modules,
        **more,
    ) as llm:  # fmt: skip
        prompts, loras = [p for p, _ in work], [name for _, name in work]
        return [o.token_ids for o in llm.generate(prompts, PARAMS, lora=loras)]


def test_f32_tokens_match_cpu(folder: Path) -> None:
    expected = run(folder, "cpu")
    assert run(folder, "cuda") == expected
    assert run(folder, "cuda", max_loras=2, max_num_seqs=8) == expected
    assert run(folder, "cuda", async_scheduling="off") == expected


@pytest.mark.parametrize("adapters", [range(6), FUSED])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_16_bit_tokens_mostly_match_cpu(folder: Path, dtype: str, adapters: Sequence[int]) -> None:
    ours, reference = (run(folder, device, dtype, adapters) for device in ("cuda", "cpu"))
    same = sum(a[:4] == b[:4] for a, b in zip(ours, reference, strict=True))
    assert same >= 12, (ours, reference)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_bases_mostly_match_cpu(folder: Path, quantization: str) -> None:
    ours, reference = (
        run(folder, device, "bf16", FUSED, quantization=quantization) for device in ("cuda", "cpu")
    )
    same = sum(a[:2] == b[:2] for a, b in zip(ours, reference, strict=True))
    assert same >= 12, (ours, reference)


def test_exact_mode_does_not_depend_on_the_batch(folder: Path) -> None:
    together = run(folder, "cuda", "bf16", exact=True)
    assert run(folder, "cuda", "bf16", exact=True, max_num_seqs=1) == together
