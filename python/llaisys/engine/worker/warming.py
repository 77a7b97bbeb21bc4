"""Steps before the first request, so that it does not pay for cold memory, nor for recording.

A device with graphs records a decode step the first time that it runs one of so many rows, and
rounds rows up to those of a few graphs (`CapturedSteps` in C++). All of them are recorded here, the
largest first: memory that grew afterwards would make those recorded before it worthless.
"""

from __future__ import annotations

import numpy as np

from llaisys.common.progress import report
from llaisys.common.step import AttentionMetadata, ModelStepInput, SamplingMetadata
from llaisys.models.base import ModelAdapter

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


def warm_up(adapter: ModelAdapter, rows: list[int], block_size: int) -> None:
    """A greedy decode step of each number of rows. Each row has a block of its own, which nobody
    holds yet, and is its first token."""
    for done, count in enumerate(rows):
        report("warming up", done, len(rows))
        numbers = np.arange(count, dtype=np.int64)
        blocks = numbers.astype(np.int32)
        zeros = np.zeros(count, dtype=np.int64)
        step = ModelStepInput(zeros, zeros.copy(), numbers, np.ones(count, dtype=np.int8))
        attention = AttentionMetadata(
            slot_mapping=blocks * np.int32(block_size),
            batch_seq_ids=numbers.copy(),
            context_lens=np.ones(count, dtype=np.int32),
            block_tables=blocks.reshape(count, 1).copy(),
        )
        adapter.forward(step, attention)
        greedy = {"temperature": np.zeros(count)}
        adapter.sample(SamplingMetadata(blocks.copy(), numbers=greedy))
