"""The sequences of a step that sample a token, and the sampled tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import ForwardOutput


class SamplingBatch(NamedTuple):
    """The sequences of a step that sample a token, in the plan's order; r rows."""

    rows: NDArray[np.int64]  # [r]: row of the input batch
    ends: NDArray[np.int64]  # [r]: position of the sampled token
    tokens: NDArray[np.int64]  # [r]: index in the step of the token before it
    drafts: NDArray[np.int64] | None = None  # [r]: draft tokens from `ends` on; None: no drafts

    def select(self, chosen: NDArray[Any]) -> SamplingBatch:
        """Return some of the rows, by index or by mask."""
        drafts = None if self.drafts is None else self.drafts[chosen]
        return SamplingBatch(self.rows[chosen], self.ends[chosen], self.tokens[chosen], drafts)

    def next_tokens(self, accepted: NDArray[np.bool_]) -> SamplingBatch:
        """Return the rows whose draft token was accepted, one token further."""
        rows, ends, tokens, drafts = self.select(accepted)
        assert drafts is not None
        return SamplingBatch(rows, ends + 1, tokens + 1, drafts - 1)

    def expand_drafts(self) -> SamplingBatch:
        """Return a row for each draft token as well, after the first row of its sequence."""
        assert self.drafts is not None
        counts = self.drafts + 1
        first = counts.cumsum() - counts
        offsets = np.arange(counts.sum()) - first.repeat(counts)
        rows, ends, tokens, drafts = self.select(np.arange(len(counts)).repeat(counts))
        assert drafts is not None
        return SamplingBatch(rows, ends + offsets, tokens + offsets, drafts - offsets)


class SampledTokens(NamedTuple):
    """The result of sampling."""

    batch: SamplingBatch  # rows with a token
    tokens: NDArray[np.int32]  # [r]
    failed: dict[int, str]  # sequence id -> error
    forward: ForwardOutput
