"""Draft heads in the engine: answers equal those without drafts, and drafts do not depend on how
the rows of a sequence were computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_heads import head_tensors, write_head
from engine_fakes import greedy, make_config, run_all
from error_helpers import invalid_input
from model_files import tiny_config, write_hf_model
from speculation import COUNT, NothingCosts, answers, random_requests, run

from llaisys.common.errors import ModelLoadError
from llaisys.common.step import ModelStepInput
from llaisys.common.types import DraftRequest
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor import estimate_memory
from llaisys.engine.llm_engine import LLMEngine
from llaisys.engine.worker.drafting.head import LATEST, MAX_IDLE, DraftHead
from llaisys.models.base import AdapterOptions
from llaisys.models.decoder import DecoderAdapter
from llaisys.models.draft_head import DraftHeadAdapter, open_draft_head
from llaisys.models.families import open_checkpoint

KINDS = ("eagle", "eagle3", "mtp")
VOCAB = 96
CONFIG = tiny_config(
    "mimo",
    hidden_size=32,
    num_hidden_layers=6,
    intermediate_size=40,
    vocab_size=VOCAB,
    max_position_embeddings=128,
)
# No answer here has 64 tokens that have occurred before: it is the head that drafts.
DRAFTS = {"num_speculative_tokens": 4, "disable_by_batch_size": 1000, "prompt_lookup_max": 64}


@pytest.fixture(autouse=True)
def _whole_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random heads would end a draft after one token."""
    monkeypatch.setattr("llaisys.engine.worker.drafting.head.MIN_PROBABILITY", 0.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model and its heads by kind; an MTP layer is also in the files of the model."""
    path = tmp_path_factory.mktemp("heads")
    weights = write_hf_model(path / "model", CONFIG, tokenizer=False)
    config = (path / "model" / "config.json").read_text()
    write_head(path / "model", CONFIG, {**weights, **head_tensors("mtp", CONFIG)})
    (path / "model" / "config.json").write_text(config)
    found = {"model": path / "model"}
    for kind in KINDS:
        tensors = head_tensors(kind, CONFIG, 50 if kind == "eagle3" else None)
        found[kind] = write_head(path / kind, {**CONFIG, "model_type": "llama"}, tensors)
    return found


def settings_of(files: dict[str, Path], **more: Any) -> dict[str, Any]:
    return {"model": str(files["model"]), "adapter_class": None, **more}


def drafts_of(kind: str, files: dict[str, Path]) -> dict[str, Any]:
    method = "mtp" if kind == "mtp" else "eagle"
    own = {} if kind == "mtp" else {"model": str(files[kind])}
    return {"method": method, **own, **DRAFTS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["roomy", "tight"])
def test_draft_head_changes_only_the_number_of_steps(name: str, kind: str, files: dict[str, Path]):
    tight = {"max_num_seqs": 8, "max_num_batched_tokens": 11, "num_blocks": 24}
    settings = settings_of(files, **({"max_num_seqs": 48} if name == "roomy" else tight))
    drafts = preemptions = 0
    for seed in range(-(-COUNT // 8)):
        requests = random_requests(seed, VOCAB)
        plain = run(requests, settings)
        drafted = run(requests, settings, speculative=drafts_of(kind, files))
        assert answers(drafted.outputs) == answers(plain.outputs)
        assert drafted.stats["worker_errors"] == 0
        drafts += drafted.stats["spec_decode_num_draft_tokens"]
        preemptions += drafted.stats["num_preemptions"]
    assert drafts and (preemptions or name == "roomy")


def scratch_draft(
    kind: str, files: dict[str, Path], tokens: list[int], count: int
) -> tuple[list[int], list[float]]:
    """Return the drafts of a fresh model and head, and their cumulative probabilities."""
    options = AdapterOptions(kv_cache_layout="slot", kv_cache_capacity_tokens=128)
    with open_checkpoint(files["model"]) as checkpoint:
        head_files = open_draft_head(None if kind == "mtp" else files[kind], checkpoint)
        model = DecoderAdapter.load(checkpoint, options)
        head = DraftHeadAdapter.load(head_files, options)
    with model, head:
        model.capture_hidden_states(head_files.layers)
        model.forward(step_of(tokens[:-1], 0), None)
        features, inputs, start = model.hidden_states(len(tokens) - 1), tokens[1:], 0
        found: list[int] = []
        chances = [1.0]
        for _ in range(count):
            head.forward_features(step_of(inputs, start), None, features)
            logits = head.logits()[-1].astype(np.float64)
            best = int(logits.argmax())
            chances.append(chances[-1] / float(np.exp(logits - logits[best]).sum()))
            found.append(best if head.token_ids is None else int(head.token_ids[best]))
            features = head.hidden_states(len(inputs))[-1:].copy()
            start, inputs = start + len(inputs), found[-1:]
    return found, chances[1:]


def step_of(tokens: Sequence[int], start: int) -> ModelStepInput:
    n = len(tokens)
    ids, positions = np.array(tokens, dtype=np.int64), np.arange(start, start + n)
    return ModelStepInput(ids, positions, np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int8))


@pytest.mark.parametrize(("kind", "sure"), [*((kind, 0.0) for kind in KINDS), ("eagle3", 0.02)])
def test_drafts_equal_those_of_a_head_with_one_prefill(
    kind: str, sure: float, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    """With chunked prompts, two sequences and rejected drafts, each draft equals one computed from
    scratch; it ends at a low probability."""
    monkeypatch.setattr("llaisys.engine.worker.drafting.head.MIN_PROBABILITY", sure)
    monkeypatch.setattr("llaisys.engine.worker.drafting.head.MAX_PENDING", 7)
    settings = settings_of(files, max_num_batched_tokens=17, enable_prefix_caching=False)
    engine = LLMEngine(make_config(seed=7, speculative_config=drafts_of(kind, files), **settings))
    assert engine.core.speculator is not None
    engine.core.speculator.costs = NothingCosts()
    drafter = engine.core.executor.worker.drafter  # type: ignore[attr-defined]
    assert isinstance(drafter, DraftHead)
    known: dict[int, list[int]] = {}
    seen: list[tuple[list[int], list[int], int]] = []
    draft = drafter.draft

    def watching(requests: Sequence[DraftRequest], released: Sequence[int]) -> list[list[int]]:
        drafts = draft(requests, released)
        for request, found in zip(requests, drafts, strict=True):
            tokens = known.setdefault(request.seq_id, [])
            tokens[request.start :] = request.token_ids
            seen.append((list(tokens), found, request.count))
        return drafts

    monkeypatch.setattr(drafter, "draft", watching)
    for index, length in enumerate((35, 3)):  # the last chunk is not computed before the draft
        prompt = [(index + 5) * k % VOCAB for k in range(1, length + 1)]
        engine.submit(prompt, greedy(9, ignore_eos=True), f"r{index}")
    run_all(engine)
    drafter.tables.check_integrity()
    assert len(seen) > 3
    lengths = set()
    for tokens, found, count in seen[:6]:
        expected, chances = scratch_draft(kind, files, tokens, count)
        length = 1 + sum(chance >= sure for chance in chances[:-1])
        assert found == expected[:length]
        lengths.add(length)
    assert len(lengths) > 1 or not sure
    engine.submit([1], greedy(1), "c")  # the others have gone
    run_all(engine)
    assert len(drafter.tables.sequences) <= 1
    engine.close()


def test_idle_draft_head_keeps_few_rows_and_a_full_batch_none(files: dict[str, Path]):
    """With a price that forbids drafts, then with free drafts."""

    class TooDear(NothingCosts):
        def first_price(self, running: int) -> float:
            return 2.0

        price = first_price

    settings = settings_of(files, speculative_config=drafts_of("eagle3", files))
    engine = LLMEngine(make_config(seed=7, **settings))
    assert engine.core.speculator is not None
    engine.core.speculator.costs = TooDear()
    drafter = engine.core.executor.worker.drafter  # type: ignore[attr-defined]
    engine.submit(list(range(50)), greedy(60, ignore_eos=True), "a")
    for _ in range(MAX_IDLE + 4):
        engine.step()
    (track,) = drafter.tracks.values()
    assert LATEST <= len(track.tokens) <= MAX_IDLE and not track.sequence.blocks
    engine.core.speculator.costs = NothingCosts()
    engine.core.speculator.trackers.clear()
    engine.step()
    drafted = engine.stats()["spec_decode_num_drafts"]
    assert drafted == 1 and track.sequence.computed >= LATEST
    drafter.tables.check_integrity()
    drafter.max_batch = 1
    engine.step()
    assert not drafter.tracks and not drafter.tables.sequences
    run_all(engine)
    assert engine.stats()["worker_errors"] == 0
    engine.close()


def test_draft_head_starts_after_a_cached_prefix(files: dict[str, Path]):
    prompt = [k * 7 % VOCAB for k in range(40)]
    settings = settings_of(files, speculative_config=drafts_of("eagle", files))
    engine = LLMEngine(make_config(seed=7, **settings))
    assert engine.core.speculator is not None
    engine.core.speculator.costs = NothingCosts()
    texts = []
    for name in ("a", "b"):
        engine.submit(prompt, greedy(12, ignore_eos=True), name)
        texts.append(run_all(engine)[name])
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[1].outputs[0].num_cached_tokens > 30
    assert engine.stats()["spec_decode_num_drafts"] > 2
    engine.close()


def test_draft_head_requirements_are_checked_and_counted(files: dict[str, Path]):
    with invalid_input("speculative_config.method"):
        LLMEngine(make_config(speculative_config=drafts_of("mtp", files)))
    with pytest.raises(ModelLoadError):
        plain = files["model"].parent / "plain"
        write_hf_model(plain, CONFIG, tokenizer=False)
        wrong = {"method": "eagle", "model": str(plain)}
        LLMEngine(make_config(**settings_of(files, speculative_config=wrong)))
    with pytest.raises(ModelLoadError):  # nor has the package one for it
        LLMEngine(
            make_config(
                model=str(plain), adapter_class=None, speculative_config={"method": "eagle3"}
            )
        )
    alone = EngineConfig(model=str(files["model"]), max_model_len=64)
    both = EngineConfig(
        model=str(files["model"]), max_model_len=64, speculative_config=drafts_of("mtp", files)
    )
    first, second = estimate_memory(alone), estimate_memory(both)
    assert second.weights > first.weights and second.kv_cache * 6 == first.kv_cache * 7
