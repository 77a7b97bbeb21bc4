"""Steps before the first request, so that it does not pay for cold memory, nor for recording.

A device with graphs records a decode step the first time that it runs one of so many rows, and
rounds rows up to those of a few graphs (`CapturedSteps` in C++). All of them are recorded here, the
largest first: memory that grew afterwards would make those recorded before it worthless. Before
them a step that uses the whole budget of tokens, as long prompts do again and again: a GPU tries
several ways to multiply so many rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from llaisys.common.progress import report
from llaisys.common.step import AttentionMetadata, ModelStepInput, SamplingMetadata
from llaisys.common.types import GpuUsage, ModelInfo
from llaisys.engine.config import EngineConfig
from llaisys.engine.worker.verification_buffers import MAX_VERIFICATION_TOKENS
from llaisys.models.base import ModelAdapter

logger = logging.getLogger("llaisys.engine")

MOST_ROWS = 512  # of a step that is recorded


def graph_rows(most: int) -> list[int]:
    """Rows of the graphs that serve steps of up to `most` rows, falling; a step of `most` rows has
    one of its own. At most 35."""
    most = min(most, MOST_ROWS)
    rows, step = [1, 2, 4, 8], 8
    while rows[-1] < most:
        if rows[-1] >= 8 * step:
            step *= 2
        rows.append(rows[-1] + step)
    return sorted({min(row, most) for row in rows}, reverse=True)


def draft_runs(config: EngineConfig, info: ModelInfo) -> list[int]:
    """Rows of the graphs that serve steps with drafts, falling; empty: there are no drafts."""
    drafts = config.speculative
    if drafts is None:
        return []
    seqs = min(config.scheduler.max_num_seqs, drafts.disable_by_batch_size - 1)
    room = min(info.max_model_len, info.num_blocks * info.block_size)
    most = min(MAX_VERIFICATION_TOKENS, room, max(1, seqs) * (1 + drafts.num_speculative_tokens))
    return graph_rows(most)[:-1]  # one row is no run


def full_step(config: EngineConfig, info: ModelInfo) -> tuple[int, int] | None:
    """Sequences, and tokens of each, of a step that uses the whole budget; None: it is a small one,
    or cannot be made of equal prompts that fit."""
    budget = config.scheduler.max_num_batched_tokens
    num_seqs = -(-budget // info.max_model_len)
    run = budget // num_seqs
    fits = num_seqs * -(-run // info.block_size) <= info.num_blocks
    return (num_seqs, run) if budget > MOST_ROWS and num_seqs * run == budget and fits else None


def warm_up(
    adapter: ModelAdapter, rows: list[int], block_size: int, runs: Sequence[int] = ()
) -> None:
    """A greedy decode step of each number of rows, each of which has a block of its own, which
    nobody holds yet, and is its first token; and one of each number of `runs`, the first tokens of
    one sequence, as a step with drafts has them. Both fall."""
    steps = sorted([(count, 1) for count in rows] + [(count, count) for count in runs])
    for done, (count, run) in enumerate(reversed(steps)):
        report("warming up", done, len(steps))
        _run_step(adapter, count // run, run, block_size)


def _run_step(
    adapter: ModelAdapter, num_seqs: int, run: int, block_size: int, are_prompts: bool = False
) -> None:
    """Of the first `run` tokens of each of so many sequences; each token draws, or the last ones of
    prompts."""
    count = num_seqs * run
    width = -(-run // block_size)
    seq_ids, positions = np.divmod(np.arange(count, dtype=np.int64), run)
    tables = np.arange(num_seqs * width, dtype=np.int32).reshape(num_seqs, width)
    blocks = tables[seq_ids, positions // block_size].astype(np.int64)
    draws = np.ones(count, dtype=np.int8)
    if are_prompts:
        draws[positions < run - 1] = 0
    step = ModelStepInput(np.zeros(count, dtype=np.int64), positions, seq_ids, draws)
    attention = AttentionMetadata(
        slot_mapping=(blocks * block_size + positions % block_size).astype(np.int32),
        batch_seq_ids=np.arange(num_seqs, dtype=np.int64),
        context_lens=np.full(num_seqs, run, dtype=np.int32),
        block_tables=tables,
    )
    adapter.forward(step, attention)
    num_drawn = int(draws.sum())
    greedy = {"temperature": np.zeros(num_drawn)}
    adapter.sample(SamplingMetadata(np.arange(num_drawn, dtype=np.int32), numbers=greedy))


def record_steps(
    adapter: ModelAdapter,
    rows: list[int],
    runs: list[int],
    full: tuple[int, int] | None,
    block_size: int,
    look: Callable[[], GpuUsage | None],
) -> None:
    """Warm up a GPU and log what that took, or a CPU, with one token. `full`: as `full_step` says.
    `look`: says how much of the GPU's memory is used; None: there is none."""
    before, start = look(), time.perf_counter()
    if before is None:
        return warm_up(adapter, [1], block_size)
    if full is not None:
        _run_step(adapter, *full, block_size, are_prompts=True)
    warm_up(adapter, rows, block_size, runs)
    after = look() or before
    logger.info(
        "recorded %d decode steps of up to %d rows in %.1f s, %.1f MiB",
        len(rows) + len(runs),
        max(rows + runs),
        time.perf_counter() - start,
        (after.memory_used - before.memory_used) / (1 << 20),
    )
