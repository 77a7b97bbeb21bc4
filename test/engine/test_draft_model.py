"""Draft models: block tables, catching up, roll-back; answers equal those without drafts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import greedy, make_config, run_all
from error_helpers import invalid_input, naming
from model_files import tiny_config, write_hf_model
from speculation import (
    COUNT,
    MOCK_VOCAB,
    NATIVE,
    NothingCosts,
    answers,
    random_requests,
    run,
)

from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.common.types import DraftRequest
from llaisys.engine.config import CacheConfig, EngineConfig, ParallelConfig, SpeculativeConfig
from llaisys.engine.executor import WorkerError, estimate_memory
from llaisys.engine.llm_engine import LLMEngine
from llaisys.engine.worker.drafting.draft_model import DraftModel
from llaisys.engine.worker.drafting.drafter import DraftBlockTables, DraftSequence
from llaisys.models.base import AdapterOptions
from llaisys.models.mock import MockAdapter

DRAFTS = {"num_speculative_tokens": 5, "disable_by_batch_size": 1000}


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the mock's vocabulary and other weights."""
    path = tmp_path_factory.mktemp("draft")
    config = tiny_config(vocab_size=MOCK_VOCAB, num_hidden_layers=1, max_position_embeddings=80)
    write_hf_model(path, config, tokenizer=False)
    return path


def config_of(model: str | Path, **changes: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(model), **DRAFTS, **changes}


def engine_with(draft: str | Path, **settings: Any) -> LLMEngine:
    settings = {**NATIVE, "speculative_config": config_of(draft), **settings}
    engine = LLMEngine(make_config(seed=7, **settings))
    assert engine.core.speculator is not None
    engine.core.speculator.costs = NothingCosts()
    return engine


def draft_model_of(engine: LLMEngine) -> DraftModel:
    found = engine.core.executor.worker.drafter  # type: ignore[attr-defined]
    assert found is not None
    return found


# ---- block tables --------------------------------------------------------------------------------


def test_draft_model_rolls_back_rejected_drafts():
    sequence = DraftSequence(1)
    sequence.set_tokens(0, [1, 2, 3])
    assert sequence.tokens == [1, 2, 3] and sequence.computed == 0
    sequence.computed = 3
    sequence.tokens += [4, 5, 6]  # drafts, of which the last was not computed
    sequence.computed = 5
    sequence.set_tokens(3, [4, 9])
    assert sequence.tokens == [1, 2, 3, 4, 9] and sequence.computed == 4
    sequence.computed, sequence.tokens = 6, [1, 2, 3, 4, 9, 6]
    sequence.set_tokens(5, [])  # nothing new: the last known token is looked at again
    assert sequence.tokens == [1, 2, 3, 4, 9] and sequence.computed == 4
    with pytest.raises(RuntimeError):
        sequence.set_tokens(7, [1])


def test_blocks_are_taken_all_or_none_and_come_back():
    tables = DraftBlockTables(num_blocks=5, block_size=4)
    first, second = tables.sequence(1), tables.sequence(2)
    assert tables.reserve(first, 9) and len(first.blocks) == 3
    assert tables.reserve(first, 9) and not tables.reserve(second, 12)
    assert not second.blocks and tables.num_free_blocks == 2
    tables.check_integrity()
    tables.release(1)
    tables.release(77)
    assert tables.num_free_blocks == 5 and tables.reserve(second, 20)
    tables.check_integrity()
    second.blocks.append(0)
    with naming(RuntimeError, "6 draft blocks", "of 5"):
        tables.check_integrity()


# ---- the model -----------------------------------------------------------------------------------


@pytest.fixture
def model():
    adapter = MockAdapter.load(None, AdapterOptions(kv_cache_capacity_tokens=64))
    made = DraftModel(adapter, block_size=16, max_step_tokens=24)
    yield made
    made.close()


def naive_draft(tokens: list[int], count: int) -> list[int]:
    """Return the drafts of a fresh model."""
    found: list[int] = []
    for _ in range(count):
        adapter = MockAdapter.load(None, AdapterOptions(kv_cache_capacity_tokens=64))
        fresh = DraftModel(adapter, block_size=16, max_step_tokens=64)
        found += fresh.draft([DraftRequest(0, 0, tokens + found, 1)])[0]
        fresh.close()
    return found


def test_drafts_do_not_depend_on_what_was_drafted_before(model: DraftModel):
    rng = random.Random(3)
    tokens = {seq: [rng.randrange(64) for _ in range(1 + 3 * seq)] for seq in (1, 2, 3)}
    sent = dict.fromkeys(tokens, 0)
    for _ in range(6):
        asked = rng.sample([1, 2, 3], rng.randrange(1, 4))
        counts = [rng.randrange(1, 5) for _ in asked]
        requests = [
            DraftRequest(seq, sent[seq], tokens[seq][sent[seq] :], count)
            for seq, count in zip(asked, counts, strict=True)
        ]
        drafts = model.draft(requests)
        for seq, count, draft in zip(asked, counts, drafts, strict=True):
            assert draft == naive_draft(tokens[seq], count)
            sent[seq] = len(tokens[seq])
            # Some drafts are accepted; another token follows.
            tokens[seq] += [*draft[: rng.randrange(count + 1)], rng.randrange(64)]
        model.tables.check_integrity()


def test_draft_model_catches_up_with_a_long_prompt_in_chunks(model: DraftModel):
    prompt = [index * 7 % 64 for index in range(40)]
    assert model.draft([DraftRequest(1, 0, prompt, 3)]) == [[]]
    assert model.tables.sequences[1].computed == 24
    # A second one gets what is left of the budget.
    short = [5, 6, 7]
    drafts = model.draft([DraftRequest(1, 40, [], 3), DraftRequest(2, 0, short, 2)])
    assert drafts == [naive_draft(prompt, 3), naive_draft(short, 2)]


def test_no_drafts_without_blocks_or_context(model: DraftModel):
    first, second = [1] * 20, [2] * 40
    drafts = model.draft([DraftRequest(1, 0, first, 2), DraftRequest(2, 0, second, 2)])
    assert len(drafts[0]) == 2 and drafts[1] == []  # 2 + 3 blocks, and there are 4
    drafts = model.draft([DraftRequest(2, 40, [], 2)], released=[1])
    assert drafts == [[]] and model.tables.sequences[2].computed == 24  # partly computed
    model.adapter.max_model_len = 41
    assert len(model.draft([DraftRequest(2, 40, [], 9)])[0]) == 1  # up to its own limit
    assert model.draft([DraftRequest(2, 40, [3], 9)]) == [[]]
    assert model.draft([DraftRequest(3, 0, [1, 64], 1)]) == [[]]  # it has no such token


# ---- in the engine -------------------------------------------------------------------------------

SETTINGS = {
    "roomy": {**NATIVE, "max_num_seqs": 48},
    "tight": {**NATIVE, "max_num_seqs": 8, "max_num_batched_tokens": 11, "num_blocks": 24},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("which", ["itself", "stranger"])
def test_draft_model_changes_only_the_number_of_steps(name: str, which: str, stranger: Path):
    drafts = accepted = preemptions = 0
    for seed in range(-(-COUNT // 3)):
        requests = random_requests(seed, MOCK_VOCAB)
        plain = run(requests, SETTINGS[name])
        model = "mock" if which == "itself" else stranger
        drafted = run(requests, SETTINGS[name], speculative=config_of(model))
        assert answers(drafted.outputs) == answers(plain.outputs)
        assert drafted.stats["worker_errors"] == 0
        drafts += drafted.stats["spec_decode_num_draft_tokens"]
        accepted += drafted.stats["spec_decode_num_accepted_tokens"]
        preemptions += drafted.stats["num_preemptions"]
    assert drafts > accepted >= (8 if which == "itself" else 0)
    assert preemptions or name == "roomy"


def test_model_as_its_own_draft_model_is_always_accepted():
    engine = engine_with("mock")
    engine.submit([1, 2, 3], greedy(25, ignore_eos=True), "a")
    engine.submit([9] * 40, greedy(13, ignore_eos=True), "b")
    run_all(engine)
    stats = engine.stats()
    assert stats["spec_decode_num_accepted_tokens"] == stats["spec_decode_num_draft_tokens"] > 20
    assert stats["num_steps"] < 9
    engine.submit([4], greedy(9, ignore_eos=True), "c")  # the others have gone
    run_all(engine)
    tables = draft_model_of(engine).tables
    tables.check_integrity()
    assert len(tables.sequences) == 1 and tables.num_free_blocks >= tables.num_blocks - 3
    engine.close()


def test_failed_draft_model_loses_only_its_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    expected = run([([1, 2, 3], greedy(20, ignore_eos=True), False)], NATIVE)
    engine = engine_with("mock")
    draft_model = draft_model_of(engine)
    forward, calls = draft_model.adapter.forward, []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return forward(*args)

    monkeypatch.setattr(draft_model.adapter, "forward", failing)
    engine.submit([1, 2, 3], greedy(20, ignore_eos=True), "a")
    assert run_all(engine)["a"].token_ids == expected.outputs["r0"].token_ids
    stats = engine.stats()
    assert stats["worker_errors"] == 1 and stats["spec_decode_num_accepted_tokens"] > 5
    assert "the draft model failed; the step has no drafts: ['a']" in caplog.text
    engine.close()
    with pytest.raises(WorkerError):
        LLMEngine(make_config()).core.executor.draft([], [])


def test_ranks_draft_once(tmp_path: Path):
    """Only the driver rank has the draft model."""
    write_hf_model(tmp_path, tiny_config(vocab_size=MOCK_VOCAB), tokenizer=False)
    texts = []
    for config in (None, config_of(tmp_path)):
        settings = {"model": str(tmp_path), "adapter_class": None, "speculative_config": config}
        engine = LLMEngine(
            make_config(seed=7, parallel=ParallelConfig(tensor_parallel_size=2), **settings)
        )
        if engine.core.speculator is not None:
            engine.core.speculator.costs = NothingCosts()
        engine.submit([1, 2, 3], greedy(12, ignore_eos=True), "a")
        texts.append(run_all(engine)["a"].token_ids)
        accepted = engine.stats()["spec_decode_num_accepted_tokens"]
        engine.close()
    assert texts[0] == texts[1] and accepted > 4


# ---- what it needs -------------------------------------------------------------------------------


def test_draft_model_with_another_vocabulary_is_rejected(tmp_path: Path):
    with invalid_input("speculative_config"):
        other = tmp_path / "larger"
        write_hf_model(other, tiny_config(), tokenizer=False)
        engine_with(other)
    target, draft = tmp_path / "target", tmp_path / "draft"
    write_hf_model(target)
    write_hf_model(draft, tiny_config(vocab_size=384))  # rows for padding
    settings = {"model": str(target), "adapter_class": None}
    engine_with(draft, **settings).close()
    tokens = (draft / "tokenizer.json").read_text().replace('"<|im_start|>"', '"<|start|>"')
    (draft / "tokenizer.json").write_text(tokens)
    with naming(ModelLoadError, "<|start|>", "<|im_start|>"):
        engine_with(draft, **settings)


def test_method_without_a_model_is_rejected():
    assert SpeculativeConfig(method="draft_model", model="x").has_weights
    for bad, message in (
        ({"method": "draft_model"}, "model is None; it must be the model that drafts"),
        ({"method": "ngram", "model": "x"}, "model is 'x'; it must be left out"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            EngineConfig(speculative_config=bad)
    wire = EngineConfig(speculative_config=config_of("some/model")).to_wire()
    assert EngineConfig.from_wire(wire).speculative.model == "some/model"


def test_the_estimate_counts_the_draft_model(stranger: Path, tmp_path: Path):
    write_hf_model(tmp_path, tiny_config(vocab_size=MOCK_VOCAB), tokenizer=False)
    alone = EngineConfig(model=str(tmp_path), max_model_len=64)
    both = EngineConfig(
        model=str(tmp_path), max_model_len=64, speculative_config=config_of(stranger)
    )
    first, second = estimate_memory(alone), estimate_memory(both)
    assert second.weights > first.weights and second.scratch > first.scratch
    # One layer beside two of the same size, in as many blocks.
    assert second.num_kv_blocks == first.num_kv_blocks
    assert second.kv_cache * 2 == first.kv_cache * 3
    bounded = replace(both, cache=CacheConfig(kv_cache_memory_bytes=1 << 20))
    assert estimate_memory(bounded).kv_cache <= 1 << 20  # of both
