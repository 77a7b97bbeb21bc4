"""Adapters against transformers with the adapter merged into the weights: logits and tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from family_parity import best_tokens
from lora_files import ALL, ATTENTION, MLP, Lora
from reference_models import (
    Piece,
    Tiny,
    make_reference,
    opened,
    random_tokens,
    reference_logits,
    run_block,
    save,
)

from llaisys import LLM, SamplingParams
from llaisys.common.parallel import ParallelConfig
from llaisys.models.families import FAMILIES
from llaisys.models.families.model_config import ModelConfig
from llaisys.models.loading.json_config import read_config
from llaisys.models.lora import open_lora, read_lora

pytestmark = pytest.mark.parity

TINY = Tiny(layers=2)
NEW_TOKENS = 24
CASES = [(1, ALL), (8, ATTENTION), (64, MLP), (256, ALL), (8, ("q_proj", "v_proj"))]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_reference(TINY, seed=1), tmp_path_factory.mktemp("model"))


def merged_reference(lora: Lora) -> object:
    model = make_reference(TINY, seed=1)
    with torch.no_grad():
        for module, (a, b) in lora.pairs.items():
            weight = model.get_parameter(f"{module}.weight")
            weight += lora.scale * (torch.from_numpy(b).double() @ torch.from_numpy(a).double())
    return model


def lora_of(base: Path, number: int) -> Lora:
    rank, targets = CASES[number]
    config = json.loads((base / "config.json").read_text())
    return Lora(config, rank, targets, seed=number, use_rslora=number == 2)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_logits_equal_merged_weights(base: Path, tmp_path: Path, number: int) -> None:
    lora, tokens = lora_of(base, number), random_tokens(20, TINY.vocab, seed=4)
    expected = reference_logits(merged_reference(lora), tokens)
    config = read_config(base, FAMILIES)[1]
    assert isinstance(config, ModelConfig)
    files = open_lora(str(lora.write_peft(tmp_path / "adapter")), config)
    with opened(base, kv_cache_capacity_tokens=256, max_model_len=128) as adapter:
        adapter.reserve_loras(2, 256)
        with read_lora(files, config, ParallelConfig()) as weights:
            adapter.load_lora(1, weights)
        forward = adapter.forward

        def with_slots(step, attention):  # type: ignore[no-untyped-def]
            step.lora_slots = np.ones(len(step.token_ids), np.int32)
            return forward(step, attention)

        adapter.forward = with_slots  # type: ignore[method-assign]
        found = run_block(adapter, [Piece(0, tokens)], {0: [3, 5]})
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def test_greedy_tokens_equal_merged_weights(base: Path, tmp_path: Path) -> None:
    prompts = [random_tokens(5 + 9 * i, TINY.vocab, seed=i) for i in range(len(CASES))]
    loras = [lora_of(base, number) for number in range(len(CASES))]
    modules = {f"a{i}": str(lora.write_peft(tmp_path / f"a{i}")) for i, lora in enumerate(loras)}
    params = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False
    )
    with LLM(str(base), max_model_len=256, lora_modules=modules) as llm:
        outputs = llm.generate(prompts, params, lora=list(modules))
        for lora, name, prompt, output in zip(loras, modules, prompts, outputs, strict=True):
            tokens = output.token_ids
            assert best_tokens(merged_reference(lora), prompt, tokens) == tokens
            assert llm.generate(prompt, params, lora=name)[0].token_ids == tokens
