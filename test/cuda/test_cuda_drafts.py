"""Speculative decoding on the GPU: draft heads match the CPU; tokens match a run without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_heads import head_tensors, write_head
from model_files import tiny_config, write_gguf, write_hf_model

from llaisys import LLM, SamplingParams
from llaisys.common.step import ModelStepInput
from llaisys.common.types import SchedulerOutputs
from llaisys.engine.executor.uni import UniProcExecutor
from llaisys.models.base import AdapterOptions
from llaisys.models.draft_head import DraftHeadAdapter, open_draft_head
from llaisys.models.families import open_checkpoint

KINDS = ("eagle", "eagle3", "mtp")
# head_dim 64 and K a multiple of 8: 16-bit dtypes take the fast kernels.
CONFIG = tiny_config(
    hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    intermediate_size=360, vocab_size=1000, num_hidden_layers=6, max_position_embeddings=1024,
)  # fmt: skip
PROMPTS = [[5, 9, 2, 77, 31] * 4, list(range(3, 90)), [11] * 33, [8], list(range(200, 17, -1))]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Paths of the model and of a draft head per kind."""
    path = tmp_path_factory.mktemp("cuda-drafts")
    write_hf_model(path / "model", CONFIG)
    write_gguf(path / "model.gguf", {**CONFIG, "intermediate_size": 384}, kind="Q8_0")
    found = {"model": path / "model", "gguf": path / "model.gguf"}
    for kind in KINDS:
        found[kind] = write_head(path / kind, CONFIG, head_tensors(kind, CONFIG, 500))
    return found


@pytest.mark.parametrize(
    ("dtype", "most"), [("f32", 1e-4), ("f16", 2e-2), ("bf16", 1e-1), ("quantised", 1e-1)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_draft_head_matches_cpu(files: dict[str, Path], kind: str, dtype: str, most: float) -> None:
    """Rows that start a sequence, then one with its own hidden state; in micro-batches of 8.
    Quantised: beside a Q8_0 model, whose tables the head shares."""
    model_path = files["gguf" if dtype == "quantised" else "model"]
    dtype = "auto" if dtype == "quantised" else dtype
    rng = np.random.default_rng(1)
    n, wide = 19, 256 * (3 if kind == "eagle3" else 1)
    tokens = rng.integers(0, 1000, n + 1)
    features = rng.standard_normal((n, wide), dtype=np.float32)
    own = rng.standard_normal((1, 256), dtype=np.float32)
    made: dict[str, list[np.ndarray]] = {}
    for device in ("cpu", "cuda"):
        options = AdapterOptions(
            device=device, dtype=dtype, kv_cache_layout="slot", max_batch_tokens=8
        )
        with open_checkpoint(model_path) as model:
            adapter = DraftHeadAdapter.load(open_draft_head(files[kind], model), options)
        with adapter:
            adapter.forward_features(step_of(tokens[:n], 0), None, features)
            made[device] = [adapter.logits().copy(), adapter.hidden_states(n).copy()]
            adapter.forward_features(step_of(tokens[n:], n), None, own)
            made[device] += [adapter.logits().copy(), adapter.hidden_states(1).copy()]
    for ours, reference in zip(made["cuda"], made["cpu"], strict=True):
        assert np.abs(ours - reference).max() <= most * np.abs(reference).max()


def step_of(tokens: np.ndarray, start: int) -> ModelStepInput:
    n = len(tokens)
    ones = np.ones(n, dtype=np.int8)
    return ModelStepInput(tokens, np.arange(start, start + n), np.zeros(n, dtype=np.int64), ones)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("method", ["ngram", "draft_model", *KINDS])
def test_speculative_decoding_keeps_tokens(
    files: dict[str, Path], method: str, exact: bool
) -> None:
    """In f32, and in 16 bits with batch-invariant results."""
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 5}
    if method != "ngram":
        name = "model" if method == "draft_model" else method
        drafts |= {"method": method.removesuffix("3"), "model": str(files[name])}
        drafts["prompt_lookup_max"] = 64  # the head proposes before n-gram lookup does
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    answers, counts = [], []
    for speculative in (None, drafts):
        options: dict[str, Any] = {"speculative_config": speculative, "exact": exact}
        options |= {"device": "cuda", "dtype": "bf16" if exact else "f32", "num_kv_blocks": 200}
        with LLM(str(files["model"]), **options) as llm:
            answers.append([output.token_ids for output in llm.generate(PROMPTS, params)])
            counts.append(llm.stats()["spec_decode_num_draft_tokens"])
            assert not llm.stats()["worker_errors"]
    assert answers[0] == answers[1]
    assert counts[0] == 0 < counts[1]


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
def test_steps_without_drafts_are_scheduled_asynchronously(
    files: dict[str, Path], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repetitive and other answers, in one batch and alone."""
    plans: list[SchedulerOutputs] = []
    execute = UniProcExecutor.execute_model

    def noted(executor: UniProcExecutor, plan: SchedulerOutputs, queued: bool = False) -> None:
        if queued:
            plans.append(plan)
        execute(executor, plan, queued)

    monkeypatch.setattr(UniProcExecutor, "execute_model", noted)
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
    if method != "ngram":
        drafts["model"] = str(files["model" if method == "draft_model" else method])
        drafts["prompt_lookup_max"] = 64
    common: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "detokenize": False}
    params = [
        SamplingParams(temperature=1.0, seed=index, **common)
        if index % 2
        else SamplingParams(temperature=0.0, **common)
        for index in range(len(PROMPTS))
    ]
    answers = []
    for speculative, ahead in ((None, "off"), (drafts, "on")):
        options: dict[str, Any] = {"speculative_config": speculative, "async_scheduling": ahead}
        options |= {"device": "cuda", "dtype": "f32", "num_kv_blocks": 200}
        with LLM(str(files["model"]), **options) as llm:
            found = [output.token_ids for output in llm.generate(PROMPTS, params)]
            found += [o.token_ids for o in llm.generate(PROMPTS[:1], params[1:2])]
            answers.append(found)
            assert not llm.stats()["worker_errors"]
            assert bool(plans) == (ahead == "on")
    assert answers[0] == answers[1]
    assert not any(plan.draft_token_ids for plan in plans)
