"""VerificationBuffers and long chunks produce the same arrays as StepBuffers."""

from __future__ import annotations

import numpy as np
import pytest

from llaisys.common.types import SchedulerOutputs
from llaisys.engine.worker import step_buffers
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.engine.worker.step_buffers import StepBuffers
from llaisys.engine.worker.verification_buffers import MAX_VERIFICATION_TOKENS, VerificationBuffers


def random_rows(rng: np.random.Generator, block_size: int) -> InputBatch:
    """Nine sequences with ids that are not their rows, all blocks in some order."""
    rows = InputBatch(12, 90, block_size)
    rows.tokens[:] = rng.integers(0, 1000, rows.tokens.shape)
    rows.blocks[:] = rng.permutation(rows.blocks.size).reshape(rows.blocks.shape)
    rows.num_blocks[:] = rows.blocks.shape[1]
    for row in rng.permutation(12)[:9].tolist():
        rows.row_of[100 - row] = row
        rows.seq_ids[row] = 100 - row
    return rows


def random_plan(rng: np.random.Generator, rows: InputBatch) -> SchedulerOutputs:
    chosen = rng.permutation(list(rows.row_of))[: rng.integers(1, 10)].tolist()
    drafts = {seq_id: rng.integers(0, 1000, rng.integers(0, 7)).tolist() for seq_id in chosen}
    drafts[chosen[0]] = [5]  # at least one draft
    counts = [1 + len(drafts[seq_id]) for seq_id in chosen]
    return SchedulerOutputs(
        step_id=0,
        seq_ids=chosen,
        starts=rng.integers(1, 80, len(chosen)).tolist(),
        counts=counts,
        samples=[True] * len(chosen),
        draft_token_ids={seq_id: draft for seq_id, draft in drafts.items() if draft},
        num_decode_tokens=sum(counts),
    )


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_verification_buffers_equal_step_buffers(block_size: int):
    rng = np.random.default_rng(block_size)
    for _ in range(30):
        rows = random_rows(rng, block_size)
        plan = random_plan(rng, rows)
        assert VerificationBuffers.fits(plan)
        few = VerificationBuffers(rows)
        given, attention = few.fill(plan)
        step = few.prepared(plan, given)
        after = rows.tokens.copy()
        buffers = StepBuffers(rows, MAX_VERIFICATION_TOKENS)
        wanted = buffers.fill_tokens(plan)
        wanted_attention = buffers.fill_attention(wanted)
        np.testing.assert_array_equal(after, rows.tokens)
        for name in ("token_ids", "positions", "seq_ids", "logits_mask", "rows", "ends"):
            check_same(getattr(step, name), getattr(wanted, name))
        for mine, other in zip(step.sampling, wanted.sampling, strict=True):
            check_same(mine, other)
        for name in ("slot_mapping", "batch_seq_ids", "context_lens"):
            check_same(getattr(attention, name), getattr(wanted_attention, name))
        tables = attention.block_tables
        assert tables.flags.c_contiguous and tables.shape[1] == -(-max(step.ends) // block_size)
        check_same(tables, wanted_attention.block_tables[:, : tables.shape[1]])


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_long_and_short_chunks_have_the_same_layout(block_size: int, monkeypatch):
    rng = np.random.default_rng(block_size)
    for _ in range(20):
        rows = random_rows(rng, block_size)
        plan = random_plan(rng, rows)
        plan.draft_token_ids = {}
        plan.samples = [bool(samples) for samples in rng.integers(0, 2, len(plan.seq_ids))]
        plan.counts = [int(rng.integers(2, 91 - start)) for start in plan.starts]
        made = []
        for long_chunk in (1, 1000):
            monkeypatch.setattr(step_buffers, "LONG_CHUNK", long_chunk)
            buffers = StepBuffers(rows, 1000)
            step = buffers.fill_tokens(plan)
            made.append((step, buffers.fill_attention(step)))
        (step, attention), (wanted, wanted_attention) = made
        for name in ("token_ids", "positions", "seq_ids", "logits_mask", "rows", "ends"):
            check_same(getattr(step, name), getattr(wanted, name))
        for mine, other in zip(step.sampling[:3], wanted.sampling[:3], strict=True):
            check_same(mine, other)
        for name in ("slot_mapping", "batch_seq_ids", "context_lens", "block_tables"):
            check_same(getattr(attention, name), getattr(wanted_attention, name))


def test_a_long_chunk_outside_its_blocks_is_an_error():
    rows = InputBatch(2, 400, 4)
    rows.row_of[7] = 1
    rows.blocks[1, :30] = range(30)
    buffers = StepBuffers(rows, 200)
    for count in (120, 121):
        plan = SchedulerOutputs(0, [7], ["r"], [0], [count], samples=[True])
        step = buffers.fill_tokens(plan)
        if count == 120:
            assert buffers.fill_attention(step).slot_mapping.tolist() == list(range(120))
    with pytest.raises(RuntimeError, match="outside the blocks of its sequence"):
        buffers.fill_attention(step)


def check_same(mine: np.ndarray, other: np.ndarray) -> None:
    assert mine.dtype == other.dtype
    np.testing.assert_array_equal(mine, other)


def test_a_token_without_a_block_is_an_error():
    rows = InputBatch(2, 40, 4)
    rows.row_of[7] = 1
    rows.blocks[1, :2] = (3, 5)
    plan = SchedulerOutputs(0, [7], ["r"], [6], [3], draft_token_ids={7: [1, 2]})
    plan.num_decode_tokens = 3
    with pytest.raises(RuntimeError, match="position 6 of a sequence is outside its blocks"):
        VerificationBuffers(rows).fill(plan)


def test_prompts_and_large_steps_do_not_use_verification_buffers():
    plan = SchedulerOutputs(0, [7], ["r"], [6], [3], draft_token_ids={7: [1, 2]})
    plan.num_decode_tokens = MAX_VERIFICATION_TOKENS
    assert VerificationBuffers.fits(plan)
    plan.num_decode_tokens += 1
    assert not VerificationBuffers.fits(plan)
    plan.num_decode_tokens, plan.num_prefill_tokens = 3, 1
    assert not VerificationBuffers.fits(plan)
    plan.num_prefill_tokens, plan.draft_token_ids = 0, {}
    assert not VerificationBuffers.fits(plan)
