"""The last two stages of a step: a token for each sequence that wants one, and what is told of
it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llaisys.common.errors import InvalidInputError
from llaisys.common.step import ForwardOutput, RowLogprobs, SamplingMetadata, TokenMasks
from llaisys.common.types import SchedulerOutputs, StepOutput, TokenLogprobs
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.engine.worker.sampling_batch import SampledTokens, SamplingBatch
from llaisys.engine.worker.sampling_state import SamplingState
from llaisys.engine.worker.timers import Timer
from llaisys.models.base import ModelAdapter


class Sampler:
    """Draws from the logits of the step that the model ran last."""

    def __init__(
        self, adapter: ModelAdapter, rows: InputBatch, sampling: SamplingState, native: Timer
    ) -> None:
        self._adapter = adapter
        self._rows = rows
        self._sampling = sampling
        self._native_timer = native  # runs while the model does

    def leave_out(
        self, drawing: SamplingBatch, masks: TokenMasks, output: StepOutput
    ) -> tuple[SamplingBatch, StepOutput]:
        """Those whose masks are missing: no token when it is late, a failure when there is none."""
        kept = []
        for index, seq_id in enumerate(self.seq_ids(drawing)):
            if seq_id in masks.failed:
                output.failed[seq_id] = masks.failed[seq_id]
            elif seq_id in masks.late:
                output.sampled[seq_id] = []
            else:
                kept.append(index)
        return drawing.only(np.array(kept, dtype=np.int64)), output

    def agreed(self, drawn: SampledTokens) -> NDArray[np.bool_] | None:
        """For which of the sequences the draft is what was drawn, so that the logits behind it are
        those of the drawn tokens; None when there are no drafts. Before `postprocess`."""
        rows, ends, _, drafts = drawn.drawing
        if drafts is None:
            return None
        agreed: NDArray[np.bool_] = (self._rows.tokens[rows, ends] == drawn.tokens) & (drafts > 0)
        return self._sampling.with_masks(rows, agreed)

    def sample(self, forward: ForwardOutput, drawing: SamplingBatch) -> SampledTokens:
        """Draw a token for each sequence of the step that wants one, in the plan's order."""
        try:
            return SampledTokens(drawing, self._draw(forward, drawing), {}, forward)
        except InvalidInputError:  # nothing is left to draw for one: not the others' fault
            failed = self._find_failing(forward, drawing)
            good = [i for i, s in enumerate(self.seq_ids(drawing)) if s not in failed]
            drawing = drawing.only(np.array(good, dtype=np.int64))
            return SampledTokens(drawing, self._draw(forward, drawing), failed, forward)

    def sample_with_drafts(
        self, plan: SchedulerOutputs, forward: ForwardOutput, drawing: SamplingBatch
    ) -> StepOutput | None:
        """All tokens of a step in one draw, where no draw depends on what the one before it gave
        and each is cheap; None: they are to be drawn one after the other."""
        if drawing.drafts is None or not self._sampling.are_greedy(drawing.rows):
            return None
        every, seq_ids = drawing.with_drafts(), self.seq_ids(drawing)
        places = zip(seq_ids, drawing.rows.tolist(), drawing.ends.tolist(), strict=True)
        try:
            tokens = self._draw(forward, every)
        except InvalidInputError:  # perhaps of a row that nobody would have drawn from
            return None
        # From here on the device waits.
        drawn, first, sampled, known = tokens.tolist(), 0, {}, self._rows.tokens.data
        for seq_id, row, end in places:
            draft, right = plan.draft_token_ids.get(seq_id, ()), 0
            while right < len(draft) and draft[right] == drawn[first + right]:
                right += 1
            known[row, end + right] = drawn[first + right]  # those before it are the drafts
            sampled[seq_id] = drawn[first : first + right + 1]
            first += len(draft) + 1
        return StepOutput(plan.step_id, sampled)

    def seq_ids(self, drawing: SamplingBatch) -> list[int]:
        ids: list[int] = self._rows.seq_ids[drawing.rows].tolist()
        return ids

    def _draw(self, forward: ForwardOutput, drawing: SamplingBatch) -> NDArray[np.int32]:
        if not len(drawing.rows):
            return np.zeros(0, dtype=np.int32)
        metadata = self.metadata(drawing, output_rows(forward, drawing.tokens))
        with self._native_timer:
            return self._adapter.sample(metadata)

    def metadata(self, drawing: SamplingBatch, rows: NDArray[np.int64]) -> SamplingMetadata:
        """How those that draw do it; `rows`: where their logits are."""
        known = self._rows
        return self._sampling.metadata(
            drawing.rows, rows, drawing.ends, known.seq_ids, known.tokens, known.dropped
        )

    def _find_failing(self, forward: ForwardOutput, drawing: SamplingBatch) -> dict[int, str]:
        """Draw for each sequence alone, to see whose fault it was and why."""
        failed = {}
        for index, seq_id in enumerate(self.seq_ids(drawing)):
            try:
                self._draw(forward, drawing.only(np.array([index])))
            except InvalidInputError as error:
                failed[seq_id] = str(error)
        return failed

    def postprocess(self, plan: SchedulerOutputs, drawn: SampledTokens) -> StepOutput:
        """Remember the drawn tokens for the next step and say whose they are."""
        sampling = self._sampling
        rows = drawn.drawing.rows
        if len(drawn.tokens) != len(rows):
            raise RuntimeError(f"{len(drawn.tokens)} tokens were drawn for {len(rows)} sequences")
        self._rows.tokens[rows, drawn.drawing.ends] = drawn.tokens
        seq_ids, tokens = self.seq_ids(drawn.drawing), drawn.tokens.tolist()
        sampled = {s: [t] for s, t in zip(seq_ids, tokens, strict=True)}
        output = StepOutput(plan.step_id, sampled, failed=drawn.failed)
        if sampling.penalised:
            for row, seq_id, token in zip(rows.tolist(), seq_ids, tokens, strict=True):
                if row in sampling.penalised:
                    self._adapter.sampler_accept(seq_id, (token,))
        for index in sampling.logprobs_wanted(rows):
            found = self._adapter.logprobs(index)
            if found is not None:
                entry = token_logprobs(tokens[index], found)
                named = sampling.named_tokens(int(rows[index]))
                if named is not None:
                    entry.top = self._logprobs_of(named, drawn, index, found.sampled)
                output.logprobs[seq_ids[index]] = [entry]
        return output

    def _logprobs_of(
        self, named: NDArray[np.int64], drawn: SampledTokens, index: int, logprob: float
    ) -> list[tuple[int, float]]:
        """Of the tokens that a request names; `logprob`: of the drawn one, in the same row."""
        row = output_rows(drawn.forward, drawn.drawing.tokens[index : index + 1])
        logits = self._adapter.logits_row(int(row[0])).astype(np.float64)
        values = logits[named] - (logits[drawn.tokens[index]] - logprob)
        return list(zip(named.tolist(), values.tolist(), strict=True))


def token_logprobs(token: int, found: RowLogprobs) -> TokenLogprobs:
    top = list(zip(found.top_ids, found.top_logprobs, strict=True))
    return TokenLogprobs(token, found.sampled, found.sampled_rank, top)


def output_rows(forward: ForwardOutput, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The output row of each token index in `wanted`, whatever order the model keeps them in."""
    ids = forward.output_ids[: forward.n_outputs].astype(np.int64)
    if len(ids) == len(wanted) and (ids == wanted).all():
        return np.arange(len(wanted), dtype=np.int64)
    order = np.argsort(ids, kind="stable")
    places = np.searchsorted(ids, wanted, sorter=order)
    found = order[np.minimum(places, len(order) - 1)] if len(order) else order
    if len(found) != len(wanted) or not np.array_equal(ids[found], wanted):
        raise RuntimeError(
            f"the model kept rows for tokens {ids.tolist()[:8]}, wanted {wanted.tolist()[:8]}"
        )
    return found
