"""Merge stream deltas that a slow reader has not fetched."""

from __future__ import annotations

from collections import deque

from llaisys.common.types import StreamOutput

# One call on the event loop formats a merged delta, so its tokens are limited.
MERGED_LOGPROBS = 32  # tokens with logprobs
MERGED_TOKENS = 4096  # tokens without


def merge_deltas(deltas: deque[StreamOutput]) -> StreamOutput:
    """Pop the first delta and merge it with the directly following ones of the same choice, up to
    MERGED_TOKENS (with logprobs MERGED_LOGPROBS) plus one delta. A delta without tokens (prompt
    progress, prompt logprobs) is returned alone."""
    first = last = deltas.popleft()
    if not first.token_ids and first.finish_reason is None:
        return first
    merged, count = [first], len(first.token_ids)
    most = MERGED_LOGPROBS if first.logprobs else MERGED_TOKENS
    while deltas and deltas[0].index == first.index and last.finish_reason is None and count < most:
        last = deltas.popleft()
        merged.append(last)
        count += len(last.token_ids)
    if len(merged) == 1:
        return first
    logprobs = [entry for delta in merged for entry in delta.logprobs or ()]
    return StreamOutput(
        first.request_id,
        first.index,
        "".join([delta.text for delta in merged]),
        [token for delta in merged for token in delta.token_ids],
        last.finish_reason,
        logprobs or None,
        last.stop_reason,
        last.output,
        first.prompt_logprobs,
        first.progress,
    )
