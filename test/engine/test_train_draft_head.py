"""scripts/train_draft_head.py: the loss falls, and what it writes opens and drafts."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from engine_fakes import greedy, make_config, run_all
from model_files import tiny_config, write_hf_model
from test_speculative import NothingCosts

from llaisys.engine.llm_engine import LLMEngine

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/train_draft_head.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_draft_head", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_a_trained_head_opens_and_drafts(script: ModuleType, tmp_path: Path, kind: str) -> None:
    model, out = tmp_path / "model", tmp_path / "head"
    write_hf_model(model, tiny_config(hidden_size=32, intermediate_size=40, eos_token_id=None))
    options = ["--model", str(model), "--kind", kind, "--out", str(out), "--device", "cpu"]
    options += ["--count", "4", "--new-tokens", "40", "--steps", "30", "--batch", "4"]
    options += ["--length", "24", "--draft-vocab", "64", "--intermediate", "48", "--rate", "0.01"]
    losses = script.main(options)
    assert len(losses) == 30 and sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 64
    card = (out / "README.md").read_text()
    assert f"A {kind} head for {model}" in card and "4 prompts" in card
    answers = []
    for drafts in (None, {"method": kind, "model": str(out), "num_speculative_tokens": 3}):
        settings = {"model": str(model), "adapter_class": None, "speculative_config": drafts}
        engine = LLMEngine(make_config(seed=7, **settings))
        if engine.core.speculator is not None:
            engine.core.speculator.costs = NothingCosts()
        engine.submit([5, 6, 7, 8], greedy(20, ignore_eos=True), "a")
        answers.append(run_all(engine)["a"].token_ids)
        stats = engine.stats()
        engine.close()
    assert answers[0] == answers[1] and stats["spec_decode_num_draft_tokens"] > 2
