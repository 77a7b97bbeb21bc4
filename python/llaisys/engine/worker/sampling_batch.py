"""The sequences of a step that sample a token, and the sampled tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import ForwardOutput


class SamplingBatch(NamedTuple):
    """The sequences of a step that draw a token, in the plan's order; d in number."""

    rows: NDArray[np.int64]  # [d]
    ends: NDArray[np.int64]  # [d]: position of the token that is drawn
    tokens: NDArray[np.int64]  # [d]: index in the step of the token before it
    drafts: NDArray[np.int64] | None = None  # [d]: drafts from `ends` on; None: nobody has any

    def only(self, chosen: NDArray[Any]) -> SamplingBatch:
        """Some of them, by index or by mask."""
        drafts = None if self.drafts is None else self.drafts[chosen]
        return SamplingBatch(self.rows[chosen], self.ends[chosen], self.tokens[chosen], drafts)

    def following(self, agreed: NDArray[np.bool_]) -> SamplingBatch:
        """The next draw of those whose draft was drawn."""
        rows, ends, tokens, drafts = self.only(agreed)
        assert drafts is not None
        return SamplingBatch(rows, ends + 1, tokens + 1, drafts - 1)

    def with_drafts(self) -> SamplingBatch:
        """All draws that there can be: those behind a sequence's drafts stand behind its first."""
        assert self.drafts is not None
        counts = self.drafts + 1
        first = counts.cumsum() - counts
        further = np.arange(counts.sum()) - first.repeat(counts)
        every = self.only(np.arange(len(counts)).repeat(counts))
        assert every.drafts is not None
        return SamplingBatch(
            every.rows, every.ends + further, every.tokens + further, every.drafts - further
        )


class SampledTokens(NamedTuple):
    """What the sampler made of a step."""

    drawing: SamplingBatch  # those for which a token was drawn
    tokens: NDArray[np.int32]  # [d]
    failed: dict[int, str]  # sequence -> why nothing could be drawn for it
    forward: ForwardOutput
