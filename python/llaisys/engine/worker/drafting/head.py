"""Drafts from a head over the model's hidden states (EAGLE, EAGLE-3, MTP).

Row p of a head combines the model's hidden state of token p with token p + 1 and predicts token
p + 2. Rows of known tokens are stored after each step of the model; rows of draft tokens follow,
with hidden states of the head itself, and the next known rows overwrite them. After a cached
prefix, a context shift or a pause the rows start later than the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import SamplingMetadata
from llaisys.common.types import DraftRequest, SchedulerOutputs, StepOutput
from llaisys.engine.worker.drafting.drafter import DraftBlockTables, Drafter, DraftSequence
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.models.base import ModelAdapter
from llaisys.models.draft_head import DraftHeadAdapter

MAX_PENDING = 256  # rows of a sequence that may wait for the next draft
# After MAX_IDLE decoded tokens without a draft a sequence restarts from its LATEST rows: the next
# draft computes few rows.
MAX_IDLE, LATEST = 32, 16
# A draft continues while its probability under the head is at least this; tuned on chat
# (docs/guides/speculative_decoding.md).
MIN_PROBABILITY = 0.45

Features = NDArray[np.float32]


class _Prediction(NamedTuple):
    """The result of a step of the head, one row per sequence."""

    tokens: NDArray[np.int64]  # most likely tokens, ids of the model
    features: Features  # hidden states of the head
    probabilities: NDArray[np.float64]  # of the tokens


@dataclass(slots=True, eq=False)
class _Track:
    """The rows of a sequence: slots [0, sequence.computed), then the pending rows."""

    sequence: DraftSequence
    end: int = 0  # tokens with hidden states
    features: list[Features] = field(default_factory=list)  # of the pending rows
    tokens: list[int] = field(default_factory=list)  # of the pending rows
    idle: int = 0  # pending rows decoded since the last draft

    @property
    def num_rows(self) -> int:
        return self.sequence.computed + len(self.tokens)


class DraftHead(Drafter):
    adapter: DraftHeadAdapter

    def __init__(self, adapter: DraftHeadAdapter, block_size: int, max_batch: int) -> None:
        """Steps of `max_batch` sequences and more are not observed."""
        self.adapter = adapter
        self.max_batch = max_batch
        self.tables = DraftBlockTables(adapter.kv_capacity_tokens // block_size, block_size)
        self.tracks: dict[int, _Track] = {}

    # ---- after a step of the model -------------------------------------------------------------

    def observe(
        self, plan: SchedulerOutputs, output: StepOutput, batch: InputBatch, model: ModelAdapter
    ) -> None:
        if len(plan.seq_ids) >= self.max_batch:
            self.skip(plan)
            return
        for seq_id in plan.released_seq_ids:
            self._release(seq_id)
        hidden = model.hidden_states(sum(plan.counts))
        first, full = 0, []
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.counts, strict=True):
            valid = count
            drafts = plan.draft_token_ids.get(seq_id, ())
            if seq_id in output.sampled:  # without rejected drafts
                valid += len(output.sampled[seq_id]) - 1 - len(drafts)
            if valid > 0 and seq_id not in output.failed:
                track = self._track(seq_id, start)
                # A copy, so that the array of the step can be freed.
                track.features.append(hidden[first : first + valid].copy())
                row = batch.row_of[seq_id]
                track.tokens += batch.tokens[row, start + 1 : start + valid + 1].tolist()
                track.end = start + valid
                if count == 1 + len(drafts):
                    track.idle += valid
                if track.idle > MAX_IDLE:
                    self._restart(track)
                elif len(track.tokens) >= MAX_PENDING:
                    full.append(track)
            first += count
        for track in full:
            if self.tables.reserve(track.sequence, track.num_rows):
                self._compute_pending([track], samples=False)
            else:
                self._release(track.sequence.seq_id)

    def skip(self, plan: SchedulerOutputs) -> None:
        """Release the sequences of the step; they restart with the next observed step."""
        for seq_id in (*plan.released_seq_ids, *plan.seq_ids):
            self._release(seq_id)

    def _track(self, seq_id: int, start: int) -> _Track:
        """Return the track of a sequence that continues at `start`; a new one unless it ended
        there."""
        track = self.tracks.get(seq_id)
        if track is None or track.end != start:
            self._release(seq_id)
            track = self.tracks[seq_id] = _Track(self.tables.sequence(seq_id))
        return track

    def _restart(self, track: _Track) -> None:
        """Restart from the latest rows, without the computed ones."""
        seq_id = track.sequence.seq_id
        self.tables.release(seq_id)
        track.sequence = self.tables.sequence(seq_id)
        track.features = [np.concatenate(track.features)[-LATEST:].copy()]
        track.tokens = track.tokens[-LATEST:]
        track.idle = len(track.tokens)

    def _release(self, seq_id: int) -> None:
        self.tracks.pop(seq_id, None)
        self.tables.release(seq_id)

    # ---- drafts --------------------------------------------------------------------------------

    def draft(
        self, requests: Sequence[DraftRequest], released: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return no draft without the hidden states of the last step or without blocks, and a
        shorter one when the probability is low. `released` is ignored: `observe` gets the plans."""
        drafts: list[list[int]] = [[] for _ in requests]
        active: list[tuple[_Track, int, list[int]]] = []  # (track, maximum, draft)
        for request, draft in zip(requests, drafts, strict=True):
            track = self.tracks.get(request.seq_id)
            if track is None or not track.tokens:
                continue
            count = min(request.count, self.adapter.max_model_len - track.num_rows + 1)
            if count > 0 and self.tables.reserve(track.sequence, track.num_rows + count - 1):
                active.append((track, count, draft))
        if not active:
            return drafts
        tokens, hidden, probabilities = self._compute_pending(
            [track for track, _, _ in active], samples=True
        )
        while True:
            for (_, _, draft), token in zip(active, tokens.tolist(), strict=True):
                draft.append(token)
            is_likely = (probabilities >= MIN_PROBABILITY).tolist()
            rest = [
                i
                for i, (_, limit, draft) in enumerate(active)
                if is_likely[i] and len(draft) < limit
            ]
            if not rest:
                return drafts
            active, before = [active[i] for i in rest], probabilities[rest]
            tracks = [track for track, _, _ in active]
            starts = [track.sequence.computed + len(draft) - 1 for track, _, draft in active]
            tokens, hidden, probabilities = self._step(
                tracks, starts, tokens[rest], hidden[rest], [1] * len(active)
            )
            probabilities *= before

    def _compute_pending(self, tracks: Sequence[_Track], samples: bool) -> _Prediction:
        """Compute the pending rows; see `_step`."""
        starts = [track.sequence.computed for track in tracks]
        counts = [len(track.tokens) for track in tracks]
        tokens = np.array([t for track in tracks for t in track.tokens], dtype=np.int64)
        features = np.concatenate([f for track in tracks for f in track.features])
        result = self._step(tracks, starts, tokens, features, counts, samples)
        for track, count in zip(tracks, counts, strict=True):
            track.sequence.computed += count
            track.features, track.tokens, track.idle = [], [], 0
        return result

    def _step(
        self,
        tracks: Sequence[_Track],
        starts: Sequence[int],  # first row of each
        tokens: NDArray[np.int64],  # of all tracks, concatenated
        features: Features,
        counts: Sequence[int],
        samples: bool = True,
    ) -> _Prediction:
        """Return the prediction after the last row of each track; empty without `samples`."""
        sequences = [track.sequence for track in tracks]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        step, attention = self.tables.step(
            sequences, starts, ends, np.ascontiguousarray(tokens), [samples] * len(tracks)
        )
        output = self.adapter.forward_features(step, attention, np.ascontiguousarray(features))
        if not samples:
            return _Prediction(np.zeros(0, dtype=np.int64), features[:0], np.zeros(0))
        outputs = np.argsort(output.output_ids[: output.n_outputs]).astype(np.int32)
        zeros = np.zeros(len(tracks))
        greedy = SamplingMetadata(outputs, numbers={"temperature": zeros, "n_logprobs": zeros})
        sampled = self.adapter.sample(greedy).astype(np.int64)
        found = [self.adapter.logprobs(index) for index in range(len(tracks))]
        probabilities = np.exp([row.logprob for row in found if row is not None])
        if self.adapter.token_ids is not None:
            sampled = self.adapter.token_ids[sampled]
        hidden = self.adapter.hidden_states(len(tokens))[np.cumsum(counts) - 1]
        return _Prediction(sampled, hidden, probabilities)
