"""Drafts from a smaller model with the same vocabulary.

The tokens that it has not computed of a sequence, prompt or not, are computed with its next draft;
computed tokens of rejected drafts are rolled back.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import SamplingMetadata
from llaisys.common.types import DraftRequest
from llaisys.engine.worker.drafting.drafter import DraftBlockTables, Drafter, DraftSequence
from llaisys.models.base import ModelAdapter


class DraftModel(Drafter):
    def __init__(self, adapter: ModelAdapter, block_size: int, max_step_tokens: int) -> None:
        """`max_step_tokens`: maximum of known tokens that one call computes."""
        self.adapter = adapter
        self.tables = DraftBlockTables(adapter.kv_capacity_tokens // block_size, block_size)
        self._max_step_tokens = max_step_tokens

    def draft(
        self, requests: Sequence[DraftRequest], released: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return the greedy continuation of each sequence; empty while known tokens are missing or
        no block is free."""
        for seq_id in released:
            self.tables.release(seq_id)
        drafts: list[list[int]] = [[] for _ in requests]
        active: list[tuple[DraftSequence, int, list[int]]] = []  # (sequence, maximum, draft)
        chunks: list[tuple[DraftSequence, int]] = []  # (sequence, tokens after the first step)
        budget = self._max_step_tokens
        for request, draft in zip(requests, drafts, strict=True):
            sequence = self.tables.sequence(request.seq_id)
            sequence.set_tokens(request.start, request.token_ids)
            known = len(sequence.tokens)
            count = self._room(sequence, request.count)
            if count < 1 or budget < 1:
                continue
            end = min(known, sequence.computed + budget)
            budget -= end - sequence.computed
            chunks.append((sequence, end))
            if end == known:
                active.append((sequence, count, draft))
        if chunks:
            self._draft(chunks, active)
        return drafts

    def _room(self, sequence: DraftSequence, count: int) -> int:
        """Return the number of tokens that can be drafted, up to `count`."""
        known = len(sequence.tokens)
        count = min(count, self.adapter.max_model_len - known)
        if count < 1 or not self.tables.reserve(sequence, known + count - 1):
            return 0
        missing = sequence.tokens[sequence.computed :]
        return count if max(missing) < self.adapter.vocab_size else 0

    def _draft(
        self,
        chunks: list[tuple[DraftSequence, int]],
        active: list[tuple[DraftSequence, int, list[int]]],
    ) -> None:
        """Compute the known tokens, then one step per further draft token."""
        active_ids = {id(sequence) for sequence, _, _ in active}
        tokens = self._step(chunks, [id(sequence) in active_ids for sequence, _ in chunks])
        while active:
            unfinished = []
            for (sequence, count, draft), token in zip(active, tokens.tolist(), strict=True):
                draft.append(token)
                if len(draft) < count:
                    sequence.tokens.append(token)
                    unfinished.append((sequence, count, draft))
            active = unfinished
            if active:
                tokens = self._step(
                    [(s, len(s.tokens)) for s, _, _ in active], [True] * len(active)
                )

    def _step(
        self, chunks: Sequence[tuple[DraftSequence, int]], samples: Sequence[bool]
    ) -> NDArray[np.int32]:
        """Compute each sequence up to its end; return the greedy tokens of those that sample."""
        sequences, ends = zip(*chunks, strict=True)
        starts = [sequence.computed for sequence in sequences]
        tokens = np.array([t for s, end in chunks for t in s.tokens[s.computed : end]], np.int64)
        step, attention = self.tables.step(sequences, starts, ends, tokens, samples)
        output = self.adapter.forward(step, attention)
        for sequence, end in chunks:
            sequence.computed = end
        if not output.n_outputs:
            return np.zeros(0, dtype=np.int32)
        outputs = np.argsort(output.output_ids[: output.n_outputs]).astype(np.int32)
        greedy = {"temperature": np.zeros(output.n_outputs)}
        return self.adapter.sample(SamplingMetadata(outputs, numbers=greedy))
