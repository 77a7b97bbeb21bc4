"""scripts/train_draft_head.py: the loss falls, and the trained head loads and drafts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_heads import reference_head
from engine_fakes import greedy, make_config, run_all
from model_files import tiny_config, write_hf_model
from speculation import NothingCosts

from llaisys.engine.llm_engine import LLMEngine
from llaisys.models.families import open_checkpoint

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import train_draft_head  # noqa: E402
from draft_training.answers import answer_all  # noqa: E402
from draft_training.head import Head  # noqa: E402
from draft_training.teacher import Teacher  # noqa: E402

KINDS = ("eagle", "eagle3", "mtp")
CONFIG = tiny_config(hidden_size=32, intermediate_size=40, eos_token_id=None, num_hidden_layers=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_hf_model(path, CONFIG)
    return path


def test_the_model_in_torch_answers_as_the_engine_does(model: Path) -> None:
    with open_checkpoint(model) as checkpoint:
        teacher = Teacher(checkpoint, "cpu")
    prompts = [[5, 6, 7, 8], [9, 10]]
    answers = answer_all(teacher, 2, lambda i: prompts[i], lambda _: 0.0, 12, 2, 1e9)
    engine = LLMEngine(make_config(seed=7, model=str(model), adapter_class=None))
    for row, prompt in enumerate(prompts):
        engine.submit(prompt, greedy(12, ignore_eos=True), str(row))
    outputs = run_all(engine)
    engine.close()
    for row, prompt in enumerate(prompts):
        said = answers.tokens[row, len(prompt) : answers.lens[row]].tolist()
        assert said == list(outputs[str(row)].token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_draft_head_chain_is_trained_as_it_is_used(model: Path, kind: str) -> None:
    """Draft j of each row against numpy, which runs the rows of the chain one after the other."""
    torch.manual_seed(1)
    with open_checkpoint(model) as checkpoint:
        teacher = Teacher(checkpoint, "cpu")
    hidden, n, depth = 32, 7, 3
    width = 3 * hidden if kind == "eagle3" else hidden
    head = Head(kind, teacher.config, 48, torch.rand(width) + 0.5, 0.7, teacher.last_norm)
    tensors: dict[str, Any] = {k.replace("/", "."): v.detach() for k, v in head.values.items()}
    if kind != "mtp":
        fc = tensors["fc.weight"].clone()
        fc[:, -width:] /= head.scale
        if kind == "eagle":
            fc[:, :-width] /= head.token_scale
        tensors["fc.weight"], tensors["fc.bias"] = fc, torch.zeros(hidden)
    tensors = {name: value.numpy() for name, value in tensors.items()}
    tokens, features = torch.arange(3, 3 + n), torch.randn(n, width)
    embedded = teacher.embedding[tokens]
    with torch.no_grad():
        drafts = head(embedded[None], features[None], depth, teacher.output[:50])
    table, output = teacher.embedding.numpy(), teacher.output[:50].numpy()
    config = {**CONFIG, "intermediate_size": 48}
    given = features.numpy()
    if kind == "eagle3":
        given = given @ tensors["fc.weight"].T
    for row in range(n):
        rows = given[: row + 1]
        for draft in range(min(depth, n - row)):
            ids = tokens.numpy()[: row + draft + 1]
            logits, own = reference_head(kind, config, tensors, table, output, ids, rows)
            found = drafts[draft][0, row + draft].numpy()
            np.testing.assert_allclose(found, logits[-1], rtol=2e-3, atol=2e-4)
            rows = np.concatenate([rows, own[-1:]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_head_opens_and_drafts(model: Path, tmp_path: Path, kind: str) -> None:
    options = ["--model", str(model), "--kinds", kind, "--out", str(tmp_path), "--device", "cpu"]
    options += ["--count", "6", "--new-tokens", "16", "--steps", "12", "--batch", "4"]
    options += ["--draft-vocab", "64", "--intermediate", "48", "--rate", "0.01"]
    options += ["--layers", "1,2,3", "--depth", "2", "--seconds", "1e9"]
    torch.set_num_threads(1)
    losses = train_draft_head.main(options)[kind]
    assert len(losses) == 12 and sum(losses[-3:]) < sum(losses[:3])
    out = tmp_path / kind
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 64
    card = (out / "README.md").read_text()
    assert f"Draft head ({kind}) for {model.name}" in card and "6 prompts" in card
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
