"""Drafts from a head over the model's hidden states (EAGLE, EAGLE-3, MTP).

Row p of a head stands for the model's hidden state of token p and the token behind it, p + 1; what
it says is a guess at token p + 2. Rows of true tokens are kept after each step of the model; drafts
are rows behind them, whose hidden states are the head's own; the next true rows overwrite them.
A head whose rows do not begin with the prompt (a known prefix, a shifted context, a time without
drafts) looks at what it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import ModelStepInput, SamplingMetadata
from llaisys.common.types import DraftRequest, SchedulerOutputs, StepOutput
from llaisys.engine.worker.drafting.block_tables import DraftBlockTables, DraftSequence
from llaisys.engine.worker.drafting.drafter import Drafter
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.models.base import ModelAdapter
from llaisys.models.draft_head import DraftHeadAdapter

MAX_PENDING = 256  # rows of a sequence that wait for the next draft; more are computed at once
# A sequence that has decoded so many tokens without a draft is begun anew from its latest rows: who
# does not draft pays for few rows when it tries again.
MAX_IDLE, LATEST = 32, 16
# A draft goes on while the head gives all of it this chance to be right: what was best on chat
# (docs/guides/speculative_decoding.md).
SURE = 0.45

Features = NDArray[np.float32]


class _Guesses(NamedTuple):
    """What a step of the head says, a row a sequence."""

    tokens: NDArray[np.int64]  # the likeliest ones, by the model's ids
    features: Features  # the head's own hidden states
    chances: NDArray[np.float64]  # that the tokens are right, as the head has it


@dataclass(slots=True, eq=False)
class _Track:
    """A sequence's rows: slots [0, sequence.computed), then those that wait."""

    sequence: DraftSequence
    end: int = 0  # tokens whose hidden states are known
    features: list[Features] = field(default_factory=list)  # of the rows that wait
    tokens: list[int] = field(default_factory=list)  # beside them
    idle: int = 0  # of them, those decoded since the last draft

    @property
    def num_rows(self) -> int:
        return self.sequence.computed + len(self.tokens)


class DraftHead(Drafter):
    adapter: DraftHeadAdapter

    def __init__(self, adapter: DraftHeadAdapter, block_size: int, too_many: int) -> None:
        """In steps of `too_many` sequences and more it does not look on: nobody asks for drafts."""
        self.adapter = adapter
        self._too_many = too_many
        self.books = DraftBlockTables(adapter.kv_capacity_tokens // block_size, block_size)
        self._tracks: dict[int, _Track] = {}

    # ---- after a step of the model -------------------------------------------------------------

    def observe(
        self, plan: SchedulerOutputs, output: StepOutput, rows: InputBatch, model: ModelAdapter
    ) -> None:
        if len(plan.seq_ids) >= self._too_many:
            self.pass_over(plan)
            return
        for seq_id in plan.released_seq_ids:
            self._forget(seq_id)
        hidden = model.hidden_states(sum(plan.counts))
        first, full = 0, []
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.counts, strict=True):
            valid = count
            drafts = plan.draft_token_ids.get(seq_id, ())
            if seq_id in output.sampled:  # drafts that were refused are no tokens of it
                valid += len(output.sampled[seq_id]) - 1 - len(drafts)
            if valid > 0 and seq_id not in output.failed:
                track = self._track(seq_id, start)
                # A copy: the step's array would be kept for a few of its rows.
                track.features.append(hidden[first : first + valid].copy())
                row = rows.row_of[seq_id]
                track.tokens += rows.tokens[row, start + 1 : start + valid + 1].tolist()
                track.end = start + valid
                if count == 1 + len(drafts):
                    track.idle += valid
                if track.idle > MAX_IDLE:
                    self._begin_anew(track)
                elif len(track.tokens) >= MAX_PENDING:
                    full.append(track)
            first += count
        for track in full:
            if self.books.reserve(track.sequence, track.num_rows):
                self._take_in([track], draws=False)
            else:
                self._forget(track.sequence.seq_id)

    def pass_over(self, plan: SchedulerOutputs) -> None:
        """Its sequences begin anew, should they be seen again."""
        for seq_id in (*plan.released_seq_ids, *plan.seq_ids):
            self._forget(seq_id)

    def _track(self, seq_id: int, start: int) -> _Track:
        """That of a sequence which goes on at `start`; it begins anew when that is another place
        than where it ended."""
        track = self._tracks.get(seq_id)
        if track is None or track.end != start:
            self._forget(seq_id)
            track = self._tracks[seq_id] = _Track(self.books.sequence(seq_id))
        return track

    def _begin_anew(self, track: _Track) -> None:
        """Without what was computed, from its latest rows on."""
        seq_id = track.sequence.seq_id
        self.books.forget(seq_id)
        track.sequence = self.books.sequence(seq_id)
        track.features = [np.concatenate(track.features)[-LATEST:].copy()]
        track.tokens = track.tokens[-LATEST:]
        track.idle = len(track.tokens)

    def _forget(self, seq_id: int) -> None:
        self._tracks.pop(seq_id, None)
        self.books.forget(seq_id)

    # ---- drafts --------------------------------------------------------------------------------

    def draft(
        self, requests: Sequence[DraftRequest], forgotten: Sequence[int] = ()
    ) -> list[list[int]]:
        """None for a sequence of which the last step's hidden states are not known, or that there
        is no room for; fewer than asked for when the head is not sure. Who is forgotten, the plans
        say."""
        drafts: list[list[int]] = [[] for _ in requests]
        active: list[tuple[_Track, int, list[int]]] = []  # (who, drafts wanted, drafts)
        for request, draft in zip(requests, drafts, strict=True):
            track = self._tracks.get(request.seq_id)
            if track is None or not track.tokens:
                continue
            count = min(request.count, self.adapter.max_model_len - track.num_rows + 1)
            if count > 0 and self.books.reserve(track.sequence, track.num_rows + count - 1):
                active.append((track, count, draft))
        if not active:
            return drafts
        drawn, hidden, chances = self._take_in([track for track, _, _ in active], draws=True)
        while True:
            for (_, _, draft), token in zip(active, drawn.tolist(), strict=True):
                draft.append(token)
            is_sure = (chances >= SURE).tolist()
            going_on = [
                i for i, (_, count, draft) in enumerate(active) if is_sure[i] and len(draft) < count
            ]
            if not going_on:
                return drafts
            active, drawn, hidden = [active[i] for i in going_on], drawn[going_on], hidden[going_on]
            before = chances[going_on]
            tracks = [track for track, _, _ in active]
            starts = [track.sequence.computed + len(draft) - 1 for track, _, draft in active]
            drawn, hidden, chances = self._step(tracks, starts, drawn, hidden, [1] * len(active))
            chances *= before

    def _take_in(self, tracks: Sequence[_Track], draws: bool) -> _Guesses:
        """Compute the rows that wait; see `_step`."""
        starts = [track.sequence.computed for track in tracks]
        counts = [len(track.tokens) for track in tracks]
        tokens = np.array([t for track in tracks for t in track.tokens], dtype=np.int64)
        features = np.concatenate([f for track in tracks for f in track.features])
        result = self._step(tracks, starts, tokens, features, counts, draws)
        for track, count in zip(tracks, counts, strict=True):
            track.sequence.computed += count
            track.features, track.tokens, track.idle = [], [], 0
        return result

    def _step(
        self,
        tracks: Sequence[_Track],
        starts: Sequence[int],  # first row of each
        tokens: NDArray[np.int64],  # of all, end to end
        features: Features,
        counts: Sequence[int],
        draws: bool = True,
    ) -> _Guesses:
        """Behind the last row of each; all empty when nothing is drawn."""
        sizes = np.array(counts, dtype=np.int64)
        edges = sizes.cumsum()
        ends = np.array(starts, dtype=np.int64) + sizes
        rows = np.arange(len(tracks)).repeat(sizes)
        positions = np.arange(len(tokens)) + (ends - edges).repeat(sizes)
        sequences = [track.sequence for track in tracks]
        mask = np.zeros(len(tokens), dtype=np.int8)
        if draws:
            mask[edges - 1] = 1
        seq_ids = np.array([s.seq_id for s in sequences], dtype=np.int64)[rows]
        step = ModelStepInput(np.ascontiguousarray(tokens), positions, seq_ids, mask)
        attention = self.books.attention(sequences, ends.tolist(), rows, positions)
        output = self.adapter.forward_features(step, attention, np.ascontiguousarray(features))
        if not draws:
            return _Guesses(np.zeros(0, dtype=np.int64), features[:0], np.zeros(0))
        outputs = np.argsort(output.output_ids[: output.n_outputs]).astype(np.int32)
        zeros = np.zeros(len(tracks))
        greedy = SamplingMetadata(outputs, numbers={"temperature": zeros, "n_logprobs": zeros})
        drawn = self.adapter.sample(greedy).astype(np.int64)
        found = [self.adapter.logprobs(index) for index in range(len(tracks))]
        chances = np.exp([row.sampled for row in found if row is not None])
        if self.adapter.token_ids is not None:
            drawn = self.adapter.token_ids[drawn]
        return _Guesses(drawn, self.adapter.hidden_states(len(tokens))[edges - 1], chances)
