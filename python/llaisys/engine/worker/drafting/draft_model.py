"""Drafts from a smaller model with the same vocabulary.

It follows the sequences from outside: what it has not computed of a sequence it computes when it is
asked, a prompt as well as a single token, and what it computed of drafts that were refused it takes
back. So preemption, prompts in pieces and steps without drafts need no word here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import ModelStepInput, SamplingMetadata
from llaisys.common.types import DraftRequest, SchedulerOutputs, StepOutput
from llaisys.engine.worker.drafting.block_tables import DraftBlockTables, DraftSequence
from llaisys.engine.worker.drafting.drafter import Drafter
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.models.base import ModelAdapter


class DraftModel(Drafter):
    def __init__(self, adapter: ModelAdapter, block_size: int, max_step_tokens: int) -> None:
        """`max_step_tokens`: known tokens that one call computes at most."""
        self.adapter = adapter
        self.books = DraftBlockTables(adapter.kv_capacity_tokens // block_size, block_size)
        self._max_step_tokens = max_step_tokens

    def draft(
        self, requests: Sequence[DraftRequest], forgotten: Sequence[int] = ()
    ) -> list[list[int]]:
        """The likeliest continuation of each sequence, at most as long as was asked for; none for
        one that is not caught up with yet, or that there is no room for."""
        for seq_id in forgotten:
            self.books.forget(seq_id)
        drafts: list[list[int]] = [[] for _ in requests]
        active: list[tuple[DraftSequence, int, list[int]]] = []  # (who, drafts wanted, drafts)
        pieces: list[tuple[DraftSequence, int]] = []  # (who, tokens after the first step)
        budget = self._max_step_tokens
        for request, draft in zip(requests, drafts, strict=True):
            sequence = self.books.sequence(request.seq_id)
            sequence.learn(request.start, request.token_ids)
            known = len(sequence.tokens)
            count = self._room(sequence, request.count)
            if count < 1 or budget < 1:
                continue
            end = min(known, sequence.computed + budget)
            budget -= end - sequence.computed
            pieces.append((sequence, end))
            if end == known:
                active.append((sequence, count, draft))
        if pieces:
            self._guess(pieces, active)
        return drafts

    def observe(
        self, plan: SchedulerOutputs, output: StepOutput, rows: InputBatch, model: ModelAdapter
    ) -> None:
        """It needs nothing but the tokens, which it is told when it is asked."""

    def pass_over(self, plan: SchedulerOutputs) -> None:
        """As above."""

    def _room(self, sequence: DraftSequence, count: int) -> int:
        """How many tokens can be drafted behind the known ones."""
        known = len(sequence.tokens)
        count = min(count, self.adapter.max_model_len - known)
        if count < 1 or not self.books.reserve(sequence, known + count - 1):
            return 0
        missing = sequence.tokens[sequence.computed :]
        return count if max(missing) < self.adapter.vocab_size else 0

    def _guess(
        self,
        pieces: list[tuple[DraftSequence, int]],
        active: list[tuple[DraftSequence, int, list[int]]],
    ) -> None:
        """A step over what is known, then one for each further draft."""
        wanted = {id(sequence) for sequence, _, _ in active}
        drawn = self._step(pieces, [id(sequence) in wanted for sequence, _ in pieces])
        while active:
            going_on = []
            for (sequence, count, draft), token in zip(active, drawn.tolist(), strict=True):
                draft.append(token)
                if len(draft) < count:
                    sequence.tokens.append(token)
                    going_on.append((sequence, count, draft))
            active = going_on
            if active:
                drawn = self._step([(s, len(s.tokens)) for s, _, _ in active], [True] * len(active))

    def _step(
        self, pieces: Sequence[tuple[DraftSequence, int]], draws: Sequence[bool]
    ) -> NDArray[np.int32]:
        """Compute each sequence up to its end; the likeliest token behind those that draw."""
        sequences, ends = zip(*pieces, strict=True)
        starts = [sequence.computed for sequence in sequences]
        counts = np.array(ends, dtype=np.int64) - starts
        edges = counts.cumsum()
        rows = np.arange(len(sequences)).repeat(counts)
        positions = np.arange(edges[-1]) + (np.array(ends) - edges).repeat(counts)
        tokens = [t for s, end in pieces for t in s.tokens[s.computed : end]]
        mask = np.zeros(len(tokens), dtype=np.int8)
        mask[edges[np.array(draws, dtype=np.bool_)] - 1] = 1
        seq_ids = np.array([s.seq_id for s in sequences], dtype=np.int64)[rows]
        step = ModelStepInput(np.array(tokens, dtype=np.int64), positions, seq_ids, mask)
        output = self.adapter.forward(step, self.books.attention(sequences, ends, rows, positions))
        for sequence, end in pieces:
            sequence.computed = end
        if not output.n_outputs:
            return np.zeros(0, dtype=np.int32)
        outputs = np.argsort(output.output_ids[: output.n_outputs]).astype(np.int32)
        greedy = {"temperature": np.zeros(output.n_outputs)}
        return self.adapter.sample(SamplingMetadata(outputs, numbers=greedy))
