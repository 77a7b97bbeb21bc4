"""Sampling on the host: the tokens after the last forward pass and after accepted drafts."""

import numpy as np
from numpy.typing import NDArray

from llaisys.common.errors import InvalidInputError
from llaisys.common.step import ForwardOutput, SamplingMetadata, TokenMasks
from llaisys.common.types import TokenLogprobs
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

    def sample(
        self, forward: ForwardOutput, batch: SamplingBatch, masks: TokenMasks | None = None
    ) -> SampledTokens:
        """Sample a token per sequence and one after each accepted draft token; write them into the
        input batch. `masks`: of structured output; sequences without masks sample no token if
        late, else they fail."""
        found = SampledTokens({}, {}, {})
        self._state.set_masks(masks, self._inputs.row_of)
        if masks is not None and (masks.late or masks.failed):
            batch = self._remove_unmasked(batch, masks, found)
        rest: SamplingBatch | None = batch
        while rest is not None and len(rest.rows):
            rest = self._sample_next(forward, rest, found)
        return found

    def _sample_next(
        self, forward: ForwardOutput, batch: SamplingBatch, found: SampledTokens
    ) -> SamplingBatch | None:
        """Sample the first token of each sequence, or all of them if none depends on those before
        it. Return the rows after the accepted draft tokens; None: all were sampled."""
        sampled, has_all = batch, False
        if batch.drafts is not None and self._state.are_greedy(batch.rows):
            sampled, has_all = batch.expand_drafts(), True
        try:
            tokens = self._call(forward, sampled)
        except InvalidInputError:  # of one sequence, or of a row after a rejected draft token
            sampled, has_all = self._remove_failing(forward, batch, found), False
            tokens = self._call(forward, sampled)
        known = self._inputs.tokens
        if sampled.drafts is not None:
            is_draft = known[sampled.rows, sampled.ends] == tokens
            accepted: NDArray[np.bool_] = is_draft & (sampled.drafts > 0)
        if has_all:
            self._add_accepted(batch, tokens.tolist(), accepted.tolist(), found)
            return None
        known[sampled.rows, sampled.ends] = tokens
        self._add(forward, sampled, tokens.tolist(), found)
        if sampled.drafts is None:
            return None
        rest = sampled.next_tokens(self._state.with_masks(sampled.rows, accepted))
        self._state.advance_masks(rest.rows)
        return rest

    def queued_metadata(self, batch: SamplingBatch) -> tuple[SamplingMetadata, list[int]]:
        """Return the sampler's arrays of a step that the device samples, whose output rows are
        those of the batch, and the rows that request logprobs."""
        self._state.set_masks(None, self._inputs.row_of)
        metadata = self._metadata(batch, np.arange(len(batch.rows)))
        return metadata, self._state.logprob_rows(batch.rows)

    def _call(self, forward: ForwardOutput, batch: SamplingBatch) -> NDArray[np.int32]:
        if not len(batch.rows):
            return np.zeros(0, dtype=np.int32)
        metadata = self._metadata(batch, output_rows(forward, batch.tokens))
        with self._native_timer:
            tokens = self._adapter.sample(metadata)
        if len(tokens) != len(batch.rows):
            raise RuntimeError(f"{len(tokens)} tokens were sampled for {len(batch.rows)} rows")
        return tokens

    def _metadata(self, batch: SamplingBatch, rows: NDArray[np.int64]) -> SamplingMetadata:
        """Return the sampler's arrays; `rows`: output rows of the batch."""
        known = self._inputs
        return self._state.metadata(
            batch.rows, rows, batch.ends, known.seq_ids, known.tokens, known.num_discarded
        )

    def _seq_ids(self, batch: SamplingBatch) -> list[int]:
        return self._inputs.seq_ids[batch.rows].tolist()

    def _remove_unmasked(
        self, batch: SamplingBatch, masks: TokenMasks, found: SampledTokens
    ) -> SamplingBatch:
        ready = []
        for index, seq_id in enumerate(self._seq_ids(batch)):
            if seq_id in masks.failed:
                found.failed[seq_id] = masks.failed[seq_id]
            elif seq_id in masks.late:
                found.tokens[seq_id] = []
            else:
                ready.append(index)
        return batch.select(np.array(ready, dtype=np.int64))

    def _remove_failing(
        self, forward: ForwardOutput, batch: SamplingBatch, found: SampledTokens
    ) -> SamplingBatch:
        """Remove the sequences without a token left: sample each one alone. One that has sampled
        tokens keeps them, and its next step fails with its first token."""
        good = []
        for index, seq_id in enumerate(self._seq_ids(batch)):
            try:
                self._call(forward, batch.select(np.array([index])))
                good.append(index)
            except InvalidInputError as error:
                if seq_id not in found.tokens:
                    found.failed[seq_id] = str(error)
        return batch.select(np.array(good, dtype=np.int64))

    def _add_accepted(
        self, batch: SamplingBatch, tokens: list[int], accepted: list[bool], found: SampledTokens
    ) -> None:
        """Add the tokens of each sequence up to the first that is not its draft token. `tokens`,
        `accepted`: of the rows of `expand_drafts`."""
        assert batch.drafts is not None
        first, known = 0, self._inputs.tokens.data
        positions = zip(batch.rows.tolist(), batch.ends.tolist(), strict=True)
        lengths = zip(self._seq_ids(batch), batch.drafts.tolist(), strict=True)
        for (seq_id, drafts), (row, end) in zip(lengths, positions, strict=True):
            last = first
            while accepted[last]:  # never at the last row of a sequence
                last += 1
            known[row, end + last - first] = tokens[last]  # accepted drafts are in place
            found.tokens.setdefault(seq_id, []).extend(tokens[first : last + 1])
            first += drafts + 1

    def _add(
        self, forward: ForwardOutput, batch: SamplingBatch, tokens: list[int], found: SampledTokens
    ) -> None:
        """Add a token of each sequence, with its logprobs, and store it in the history of
        penalties."""
        state, known = self._state, self._inputs.tokens
        rows, ends = batch.rows, batch.ends
        seq_ids = self._seq_ids(batch)
        if batch.drafts is None:
            found.tokens.update({s: [t] for s, t in zip(seq_ids, tokens, strict=True)})
        else:
            for seq_id, token in zip(seq_ids, tokens, strict=True):
                found.tokens.setdefault(seq_id, []).append(token)
        if state.penalised:
            for row, seq_id, token, end in zip(
                rows.tolist(), seq_ids, tokens, ends.tolist(), strict=True
            ):
                if row not in state.penalised:
                    continue
                new = [token]
                if state.penalised[row][0] > 0:  # repeat_last_n
                    prompt, new = state.history(row, known[row, : end + 1])
                    self._adapter.sampler_reset(seq_id, prompt)
                self._adapter.sampler_accept(seq_id, new)
        for index in state.logprob_rows(rows):
            row, entry = int(rows[index]), self._adapter.logprobs(index)
            if entry is not None and state.observe(row, entry.logprob):
                token_ids = state.logprob_token_ids(row)
                if token_ids is not None:
                    logits_row = int(output_rows(forward, batch.tokens[index : index + 1])[0])
                    entry = self._logprobs_of(token_ids, logits_row, entry)
                found.logprobs.setdefault(seq_ids[index], []).append(entry)

    def _logprobs_of(
        self, token_ids: NDArray[np.int64], row: int, entry: TokenLogprobs
    ) -> TokenLogprobs:
        """Return the entry of an output row with the logprobs of `token_ids` and the sampled token,
        not those of the best."""
        logits = self._adapter.logits_row(row).astype(np.float64)
        values = logits[token_ids] - (logits[entry.token_id] - entry.logprob)
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
