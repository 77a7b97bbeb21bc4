"""The last two stages of a step: sample a token per sequence, and build the step output."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llaisys.common.errors import InvalidInputError
from llaisys.common.step import ForwardOutput, SamplingMetadata, TokenMasks
from llaisys.common.types import SchedulerOutputs, StepOutput, TokenLogprobs
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.engine.worker.sampling_state import SamplingState
from llaisys.engine.worker.step_buffers import SampledTokens, SamplingBatch
from llaisys.engine.worker.timers import Timer
from llaisys.models.base import ModelAdapter


class Sampler:
    """Samples from the logits of the last forward pass."""

    def __init__(
        self, adapter: ModelAdapter, inputs: InputBatch, state: SamplingState, native: Timer
    ) -> None:
        self._adapter = adapter
        self._inputs = inputs
        self._state = state
        self._native_timer = native  # time inside the model

    def remove_unmasked(
        self, batch: SamplingBatch, masks: TokenMasks, output: StepOutput
    ) -> tuple[SamplingBatch, StepOutput]:
        """Remove the sequences without masks: they sample no token if late, else they fail."""
        ready = []
        for index, seq_id in enumerate(self.seq_ids(batch)):
            if seq_id in masks.failed:
                output.failed[seq_id] = masks.failed[seq_id]
            elif seq_id in masks.late:
                output.sampled[seq_id] = []
            else:
                ready.append(index)
        return batch.select(np.array(ready, dtype=np.int64)), output

    def accepted(self, sampled: SampledTokens) -> NDArray[np.bool_] | None:
        """Return which sequences sampled their draft token, so the logits after it are valid; None:
        no drafts. Call before `postprocess`, which overwrites the drafts."""
        rows, ends, _, drafts = sampled.batch
        if drafts is None:
            return None
        is_draft = self._inputs.tokens[rows, ends] == sampled.tokens
        accepted: NDArray[np.bool_] = is_draft & (drafts > 0)
        return self._state.with_masks(rows, accepted)

    def sample(self, forward: ForwardOutput, batch: SamplingBatch) -> SampledTokens:
        """Sample a token for each sequence of the batch, in the plan's order."""
        try:
            return SampledTokens(batch, self._sample(forward, batch), {}, forward)
        except InvalidInputError:  # one sequence has no token left; the others are sampled
            failed = self._find_failing(forward, batch)
            good = [i for i, s in enumerate(self.seq_ids(batch)) if s not in failed]
            batch = batch.select(np.array(good, dtype=np.int64))
            return SampledTokens(batch, self._sample(forward, batch), failed, forward)

    def sample_greedy_drafts(
        self, plan: SchedulerOutputs, forward: ForwardOutput, batch: SamplingBatch
    ) -> StepOutput | None:
        """Verify the drafts of a greedy batch in one sampler call; None: not applicable."""
        if batch.drafts is None or not self._state.are_greedy(batch.rows):
            return None
        expanded, seq_ids = batch.expand_drafts(), self.seq_ids(batch)
        positions = zip(seq_ids, batch.rows.tolist(), batch.ends.tolist(), strict=True)
        try:
            tokens = self._sample(forward, expanded).tolist()
        except InvalidInputError:  # perhaps of a row after a rejected draft
            return None
        # The device is idle from here on.
        first, sampled, known = 0, {}, self._inputs.tokens.data
        for seq_id, row, end in positions:
            draft, accepted = plan.draft_token_ids.get(seq_id, ()), 0
            while accepted < len(draft) and draft[accepted] == tokens[first + accepted]:
                accepted += 1
            known[row, end + accepted] = tokens[first + accepted]  # accepted drafts are in place
            sampled[seq_id] = tokens[first : first + accepted + 1]
            first += len(draft) + 1
        return StepOutput(plan.step_id, sampled)

    def seq_ids(self, batch: SamplingBatch) -> list[int]:
        return self._inputs.seq_ids[batch.rows].tolist()

    def _sample(self, forward: ForwardOutput, batch: SamplingBatch) -> NDArray[np.int32]:
        if not len(batch.rows):
            return np.zeros(0, dtype=np.int32)
        metadata = self.metadata(batch, output_rows(forward, batch.tokens))
        with self._native_timer:
            return self._adapter.sample(metadata)

    def metadata(self, batch: SamplingBatch, rows: NDArray[np.int64]) -> SamplingMetadata:
        """Return the sampler's arrays; `rows`: output rows of the batch."""
        known = self._inputs
        return self._state.metadata(
            batch.rows, rows, batch.ends, known.seq_ids, known.tokens, known.num_discarded
        )

    def _find_failing(self, forward: ForwardOutput, batch: SamplingBatch) -> dict[int, str]:
        """Sample each sequence alone; return the errors by sequence id."""
        failed = {}
        for index, seq_id in enumerate(self.seq_ids(batch)):
            try:
                self._sample(forward, batch.select(np.array([index])))
            except InvalidInputError as error:
                failed[seq_id] = str(error)
        return failed

    def postprocess(self, plan: SchedulerOutputs, result: SampledTokens) -> StepOutput:
        """Store the sampled tokens for the next step and build the step output."""
        state = self._state
        rows = result.batch.rows
        if len(result.tokens) != len(rows):
            raise RuntimeError(
                f"{len(result.tokens)} tokens were sampled for {len(rows)} sequences"
            )
        self._inputs.tokens[rows, result.batch.ends] = result.tokens
        seq_ids, tokens = self.seq_ids(result.batch), result.tokens.tolist()
        sampled = {s: [t] for s, t in zip(seq_ids, tokens, strict=True)}
        output = StepOutput(plan.step_id, sampled, failed=result.failed)
        if state.penalised:
            ends = result.batch.ends.tolist()
            for row, seq_id, token, end in zip(rows.tolist(), seq_ids, tokens, ends, strict=True):
                if row not in state.penalised:
                    continue
                new = [token]
                if state.penalised[row][0] > 0:  # repeat_last_n
                    prompt, new = state.history(row, self._inputs.tokens[row, : end + 1])
                    self._adapter.sampler_reset(seq_id, prompt)
                self._adapter.sampler_accept(seq_id, new)
        for index in state.logprob_rows(rows):
            entry = self._adapter.logprobs(index)
            if entry is not None and state.observe(int(rows[index]), entry.logprob):
                token_ids = state.logprob_token_ids(int(rows[index]))
                if token_ids is not None:
                    entry = self._logprobs_of(token_ids, result, index, entry)
                output.logprobs[seq_ids[index]] = [entry]
        return output

    def _logprobs_of(
        self, token_ids: NDArray[np.int64], result: SampledTokens, index: int, entry: TokenLogprobs
    ) -> TokenLogprobs:
        """Return the entry of a row with the logprobs of `token_ids` and the sampled token, not
        those of the best."""
        row = output_rows(result.forward, result.batch.tokens[index : index + 1])
        logits = self._adapter.logits_row(int(row[0])).astype(np.float64)
        values = logits[token_ids] - (logits[result.tokens[index]] - entry.logprob)
        top = list(zip(token_ids.tolist(), values.tolist(), strict=True))
        if entry.token_id not in token_ids:
            top.append((entry.token_id, entry.logprob))
        return TokenLogprobs.of(entry.token_id, entry.logprob, entry.rank, top)


def output_rows(forward: ForwardOutput, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the output row of each token index of a step; output rows may be in any order."""
    ids = forward.output_ids[: forward.n_outputs].astype(np.int64)
    if len(ids) == len(tokens) and (ids == tokens).all():
        return np.arange(len(tokens), dtype=np.int64)
    order = np.argsort(ids, kind="stable")
    indices = np.searchsorted(ids, tokens, sorter=order)
    found = order[np.minimum(indices, len(order) - 1)] if len(order) else order
    if len(found) != len(tokens) or not np.array_equal(ids[found], tokens):
        raise RuntimeError(
            f"the model has output rows of tokens {ids.tolist()[:8]}, not {tokens.tolist()[:8]}"
        )
    return found
