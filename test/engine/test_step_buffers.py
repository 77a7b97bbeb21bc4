"""StepBuffers against a loop over the tokens of a step."""

from __future__ import annotations

import numpy as np
import pytest
from error_helpers import naming

from llaisys.common.errors import InvalidInputError
from llaisys.common.types import SchedulerOutputs
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.engine.worker.step_buffers import StepBuffers

MAX_LEN = 90


def random_batch(rng: np.random.Generator, block_size: int) -> InputBatch:
    """Nine sequences with ids that are not their rows, all blocks in some order."""
    batch = InputBatch(12, MAX_LEN, block_size)
    batch.tokens[:] = rng.integers(0, 1000, batch.tokens.shape)
    batch.blocks[:] = rng.permutation(batch.blocks.size).reshape(batch.blocks.shape)
    batch.num_blocks[:] = batch.blocks.shape[1]
    batch.lora_slots[:] = rng.integers(-1, 4, 12)
    batch.num_loras = int((batch.lora_slots >= 0).sum())
    for row in rng.permutation(12)[:9].tolist():
        batch.row_of[100 - row] = row
        batch.seq_ids[row] = 100 - row
    return batch


def random_plan(rng: np.random.Generator, batch: InputBatch, kind: str) -> SchedulerOutputs:
    """`kind`: "decode" one token each, "draft" up to six drafts, "prompt" chunks of any length."""
    chosen = rng.permutation(list(batch.row_of))[: rng.integers(1, 10)].tolist()
    starts = rng.integers(1, 80, len(chosen)).tolist()
    plan = SchedulerOutputs(0, chosen, starts=starts, samples=[True] * len(chosen))
    plan.counts = [1] * len(chosen)
    if kind == "draft":
        drafts = {seq_id: rng.integers(0, 1000, rng.integers(0, 7)).tolist() for seq_id in chosen}
        plan.draft_token_ids = {seq_id: draft for seq_id, draft in drafts.items() if draft}
        plan.counts = [1 + len(drafts[seq_id]) for seq_id in chosen]
    elif kind == "prompt":
        plan.counts = [int(rng.integers(1, MAX_LEN + 1 - start)) for start in starts]
        plan.samples = [bool(samples) for samples in rng.integers(0, 2, len(chosen))]
    return plan


@pytest.mark.parametrize("kind", ["decode", "draft", "prompt"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_arrays_of_a_step(block_size: int, kind: str):
    rng = np.random.default_rng(block_size)
    for _ in range(30):
        batch = random_batch(rng, block_size)
        plan = random_plan(rng, batch, kind)
        buffers = StepBuffers(batch, 1000)
        step = buffers.fill_tokens(plan)
        attention = buffers.fill_attention(step)
        index = 0
        sampled = []
        for seq_id, start, count, samples in zip(
            plan.seq_ids, plan.starts, plan.counts, plan.samples, strict=True
        ):
            row, drafts = batch.row_of[seq_id], plan.draft_token_ids.get(seq_id, [])
            assert batch.tokens[row, start + count - len(drafts) : start + count].tolist() == drafts
            for position in range(start, start + count):
                block, offset = divmod(position, block_size)
                assert step.token_ids[index] == batch.tokens[row, position]
                assert step.positions[index] == position
                assert step.seq_ids[index] == seq_id
                needs_logits = samples and position >= start + count - 1 - len(drafts)
                assert step.logits_mask[index] == needs_logits
                slots = step.lora_slots
                assert (-1 if slots is None else slots[index]) == batch.lora_slots[row]
                slot = batch.blocks[row, block] * block_size + offset
                assert attention.slot_mapping[index] == slot
                index += 1
            if samples:
                first = index - 1 - len(drafts)
                sampled.append((row, start + count - len(drafts), first, len(drafts)))
        assert len(step.token_ids) == len(attention.slot_mapping) == index
        rows, ends, tokens, drafts = step.sampling
        drafts = np.zeros_like(rows) if drafts is None else drafts
        assert np.stack((rows, ends, tokens, drafts), axis=1).tolist() == [
            list(entry) for entry in sampled
        ]
        np.testing.assert_array_equal(step.ends, np.add(plan.starts, plan.counts))
        np.testing.assert_array_equal(attention.context_lens, step.ends)
        np.testing.assert_array_equal(attention.batch_seq_ids, plan.seq_ids)
        np.testing.assert_array_equal(attention.block_tables, batch.blocks[step.rows])
        assert attention.block_tables.flags.c_contiguous


def test_a_token_outside_its_blocks_is_an_error():
    batch = InputBatch(2, 400, 4)
    batch.row_of[7] = 1
    batch.blocks[1, :30] = range(30)
    buffers = StepBuffers(batch, 200)
    for count in (120, 121):
        plan = SchedulerOutputs(0, [7], ["r"], [0], [count], samples=[True])
        step = buffers.fill_tokens(plan)
        if count == 120:
            assert buffers.fill_attention(step).slot_mapping.tolist() == list(range(120))
    with naming(InvalidInputError, "position 120"):
        buffers.fill_attention(step)


def test_a_step_beyond_the_arrays_is_an_error():
    batch = InputBatch(2, 400, 4)
    batch.row_of[7] = 1
    plan = SchedulerOutputs(0, [7], ["r"], [0], [201], samples=[True])
    with naming(RuntimeError, "201"):
        StepBuffers(batch, 200).fill_tokens(plan)
    plan = SchedulerOutputs(0, [7], ["r"], [300], [150], samples=[True])
    with naming(InvalidInputError, "150", "300"):
        StepBuffers(batch, 200).fill_tokens(plan)
