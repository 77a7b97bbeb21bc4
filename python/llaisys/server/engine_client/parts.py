"""Parts of an answer that a slow reader has not fetched become one."""

from __future__ import annotations

from collections import deque

from llaisys.common.types import StreamOutput

# Tokens that are put together when they have logprobs: a part is written by one call on the loop.
MERGED_LOGPROBS = 32
MERGED_TOKENS = 4096  # of those without: a part is read by one call on the loop, too


def merge_parts(parts: deque[StreamOutput]) -> StreamOutput:
    """Take the first part and what directly follows it of the same choice; no more
    than MERGED_TOKENS (with logprobs MERGED_LOGPROBS) and a part. What comes before the first token
    stays by itself: the prompt's logprobs are not in it."""
    first = last = parts.popleft()
    if not first.token_ids and first.finish_reason is None:
        return first
    taken, count = [first], len(first.token_ids)
    most = MERGED_LOGPROBS if first.logprobs else MERGED_TOKENS
    while parts and parts[0].index == first.index and last.finish_reason is None and count < most:
        last = parts.popleft()
        taken.append(last)
        count += len(last.token_ids)
    if len(taken) == 1:
        return first
    logprobs = [entry for part in taken for entry in part.logprobs or ()]
    return StreamOutput(
        first.request_id,
        first.index,
        "".join([part.text for part in taken]),
        [token for part in taken for token in part.token_ids],
        last.finish_reason,
        logprobs or None,
        last.stop_reason,
        last.output,
        first.prompt_logprobs,
        first.progress,
    )
