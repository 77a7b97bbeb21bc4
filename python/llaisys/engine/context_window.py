"""Context shift: which tokens of a request the KV cache holds, and which ones a shift discards.

`Request.token_ids` has all tokens of a request. The context holds the first `num_keep_tokens` and
the tokens after the `num_discarded_tokens`. When it is full, half of the other tokens (whole
blocks, at least one) are discarded and the rest moves up.

The position of a shift depends only on the number of tokens, the kept tokens and the engine's
sizes. A preempted request is recomputed and shifts at the same positions, so its output is
unchanged.
"""

import sys

from llaisys.common.request import Request
from llaisys.common.validation import invalid_value

DEFAULT_KEEP = 4  # attention sinks


def context_length(max_model_len: int, num_blocks: int, block_size: int) -> int:
    """Return the tokens of one request in the KV cache with context shift: whole blocks."""
    return min(max_model_len // block_size, num_blocks) * block_size


class ContextWindow:
    """`length`: tokens of a full context, whole blocks; None: no context shift."""

    def __init__(self, length: int | None, block_size: int) -> None:
        self.is_shifted = length is not None
        self.length = sys.maxsize if length is None else length
        self.block_size = block_size

    @property
    def max_keep(self) -> int:
        """The limit of `n_keep`: one block can be discarded, and one token remains."""
        return self.length - self.block_size - 1

    def num_keep(self, request: Request) -> int:
        """Return the tokens that `n_keep` keeps; InvalidInputError when none could be discarded."""
        if not self.is_shifted:
            return 0
        n_keep = request.sampling.n_keep
        if n_keep is None:
            return min(DEFAULT_KEEP, request.num_prompt_tokens, self.max_keep)
        keep = request.num_prompt_tokens if n_keep == -1 else n_keep
        keep = min(keep, request.num_prompt_tokens)
        if keep > self.max_keep:
            limit = f"at most {self.max_keep}: max_model_len less a block of {self.block_size}"
            raise invalid_value("n_keep", keep, limit)
        return keep

    def num_discard(self, request: Request) -> int:
        """Return the tokens that the next shift discards."""
        half = (self.length - request.num_keep_tokens) // 2
        return max(1, half // self.block_size) * self.block_size

    def room(self, request: Request) -> int:
        """Return the tokens that one step can compute: up to the next shift, which may be due."""
        return (self.length - request.position) or self.num_discard(request)

    def is_full(self, request: Request, num_tokens: int) -> bool:
        """Whether a shift is due before `num_tokens` tokens are computed."""
        return num_tokens - request.num_discarded_tokens > self.length
