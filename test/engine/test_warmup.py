"""Warm-up: one token, or every decode step that a GPU captures."""

from __future__ import annotations

import pytest
from engine_fakes import adapter_of, expected_tokens, greedy, make_engine, run_prompts

from llaisys.common.progress import progress_listener
from llaisys.common.types import GpuUsage
from llaisys.engine.worker.warmup import graph_rows, run_step
from llaisys.models.device import padded_rows


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 17, 63, 64, 65, 100, 256, 300, 512, 2000])
def test_every_decode_step_has_its_graph(most):
    rows = graph_rows(most)
    assert rows == sorted(rows, reverse=True) and len(rows) <= 35
    assert rows[0] == min(most, 512)
    recorded = {padded_rows(row) for row in rows}
    assert len(recorded) == len(rows)
    assert {padded_rows(row) for row in range(1, rows[0] + 1)} == recorded


def test_at_most_seven_rows_or_a_quarter_of_a_captured_step_are_padding():
    for rows in range(1, 513):
        padded = padded_rows(rows)
        assert padded_rows(padded) == padded >= rows
        assert padded - rows <= max(7, padded // 4)
    assert [padded_rows(rows) for rows in (-1, 0, 513, 1 << 30)] == [0] * 4
    assert [padded_rows(rows, has_drafts=True) for rows in (5, 64, 65)] == [8, 64, 0]


def test_gpu_warmup_captures_the_largest_step_first_and_reports_progress(monkeypatch):
    engine = make_engine(max_num_seqs=20, num_blocks=18, max_num_batched_tokens=64)
    worker, adapter = engine.core.executor.worker, adapter_of(engine)
    seen, heard = [], []
    adapter.on_forward = lambda step: seen.append(len(step.token_ids))
    monkeypatch.setattr(worker, "gpu_usage", lambda: GpuUsage(0, 1, 2))
    with progress_listener(lambda *said: heard.append(said)):
        worker.warmup()
    assert seen == [18, 16, 8, 4, 2, 1]  # as many sequences as there are blocks
    assert heard == [("warming up", done, 6) for done in range(6)]
    assert run_prompts(engine, [[1, 2]], greedy(5)) == [expected_tokens([1, 2], 5)]


@pytest.mark.parametrize(
    ("max_model_len", "num_blocks", "steps"),
    [(500, 160, [(640, 2, 2)]), (160, 160, [(640, 4, 4)]), (300, 160, []), (500, 159, [])],
)
def test_gpu_warmup_starts_with_a_step_of_the_whole_budget(
    monkeypatch, max_model_len, num_blocks, steps
):
    engine = make_engine(
        max_num_seqs=1, block_size=4, num_blocks=num_blocks, max_model_len=max_model_len,
        max_num_batched_tokens=640,
    )  # fmt: skip
    worker, adapter = engine.core.executor.worker, adapter_of(engine)
    seen = []
    adapter.on_forward = lambda step: seen.append(
        (len(step.token_ids), len(set(step.seq_ids.tolist())), int(step.logits_mask.sum()))
    )
    monkeypatch.setattr(worker, "gpu_usage", lambda: GpuUsage(0, 1, 2))
    worker.warmup()
    assert seen == [*steps, (1, 1, 1)]
    assert run_prompts(engine, [[1, 2]], greedy(5)) == [expected_tokens([1, 2], 5)]


def test_a_cpu_warms_up_with_one_token():
    engine = make_engine(warmup=True)
    assert adapter_of(engine).num_tokens == 1


def test_warmup_rows_do_not_share_a_block():
    engine = make_engine(num_blocks=8)
    adapter = adapter_of(engine)
    run_step(adapter, 4, 8, 1)
    assert (adapter.kv.reshape(8, 4)[:, 0] == 0).all() and (adapter.kv >= 0).sum() == 8


def test_verification_steps_are_captured(monkeypatch):
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    settings = {"max_num_seqs": 8, "num_blocks": 18, "max_num_batched_tokens": 64}
    engine = make_engine(speculative_config=drafts, **settings)
    worker, adapter = engine.core.executor.worker, adapter_of(engine)
    seen = []
    adapter.on_forward = lambda step: seen.append(
        (len(step.token_ids), len(set(step.seq_ids.tolist())))
    )
    monkeypatch.setattr(worker, "gpu_usage", lambda: GpuUsage(0, 1, 2))
    worker.warmup()
    runs = [(32, 1), (24, 1), (16, 1), (8, 8), (8, 1), (4, 4), (4, 1), (2, 2), (2, 1), (1, 1)]
    assert sorted(seen, reverse=True) == sorted(runs, reverse=True)
    assert [tokens for tokens, _ in seen] == sorted((t for t, _ in seen), reverse=True)
    assert run_prompts(engine, [[1, 2]], greedy(5)) == [expected_tokens([1, 2], 5)]
