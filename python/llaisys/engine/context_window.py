"""How much of a request the KV cache holds, and what goes when that is full.

`Request.token_ids` has all tokens of a request; the context holds a window of them: the first
`num_keep_tokens`, then those behind the `num_discarded_tokens` that are gone. When it is full, half
of what is not kept is dropped (a number of whole blocks, at least one) and the rest moves up.

Where a shift happens depends on nothing but the number of tokens, the kept ones and the engine's
sizes: a request that was preempted computes all its tokens anew, and shifts again where it did
before. So its output is the same as if nobody had taken its place.
"""

from __future__ import annotations

import sys

from llaisys.common.request import Request
from llaisys.common.validation import invalid_value

DEFAULT_KEPT = 4  # tokens at the beginning that attention leans on, whatever they say


def context_length(max_model_len: int, num_blocks: int, block_size: int) -> int:
    """Tokens that the KV cache holds of one request when contexts are shifted: whole blocks."""
    return min(max_model_len // block_size, num_blocks) * block_size


class ContextWindow:
    """`length`: tokens of a full context, whole blocks; None: contexts are not shifted."""

    def __init__(self, length: int | None, block_size: int) -> None:
        self.is_shifted = length is not None
        self.length = sys.maxsize if length is None else length
        self.block_size = block_size

    @property
    def most_kept(self) -> int:
        """One block can go, and a token is left to go on from."""
        return self.length - self.block_size - 1

    def kept_tokens(self, request: Request) -> int:
        """What `n_keep` comes to; InvalidInputError when nothing could be dropped."""
        if not self.is_shifted:
            return 0
        wanted = request.sampling.n_keep
        if wanted is None:
            return min(DEFAULT_KEPT, request.num_prompt_tokens, self.most_kept)
        kept = request.num_prompt_tokens if wanted == -1 else wanted
        kept = min(kept, request.num_prompt_tokens)
        if kept > self.most_kept:
            limit = f"at most {self.most_kept}: max_model_len less a block of {self.block_size}"
            raise invalid_value("n_keep", kept, limit)
        return kept

    def num_dropped(self, request: Request) -> int:
        """Tokens that the next shift drops."""
        half = (self.length - request.num_keep_tokens) // 2
        return max(1, half // self.block_size) * self.block_size

    def room(self, request: Request) -> int:
        """Tokens that it can compute in one step: up to the next shift, which may come first."""
        return (self.length - request.position) or self.num_dropped(request)

    def is_full(self, request: Request, num_tokens: int) -> bool:
        """Whether it must be shifted before it has `num_tokens` tokens computed."""
        return num_tokens - request.num_discarded_tokens > self.length
