"""Join engine outputs that arrive together; merge stream deltas that a slow reader has not
fetched."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby

from llaisys.common.types import StreamOutput, TokenUpdate
from llaisys.server.engine_client.messages import FromEngine, Outputs

# One call on the event loop formats a merged delta, so its tokens are limited.
MERGED_LOGPROBS = 32  # tokens with logprobs
MERGED_TOKENS = 4096  # tokens without


def join_outputs(messages: Iterable[FromEngine]) -> Iterator[FromEngine]:
    """Yield the messages, consecutive `Outputs` as one. There a request has its tokens in one
    update, which is as cheap to process as one token."""
    for is_outputs, group in groupby(messages, lambda message: isinstance(message, Outputs)):
        first, *others = group
        if is_outputs and others:
            found = [message for message in (first, *others) if isinstance(message, Outputs)]
            updates = [update for message in found for update in message.updates]
            yield Outputs(join_updates(updates), found[-1].stats)
        else:
            yield first
            yield from others


def join_updates(updates: Iterable[TokenUpdate]) -> list[TokenUpdate]:
    """Join the updates of each request, in order, where they have nothing but tokens."""
    joined: list[TokenUpdate] = []
    places: dict[str, int] = {}  # of the latest update of a request, if it can be joined
    for update in updates:
        is_plain = update.logprobs is None and update.prompt_logprobs is None
        if not is_plain or not update.token_ids or update.pooled is not None:
            places.pop(update.request_id, None)
            joined.append(update)
            continue
        place = places.setdefault(update.request_id, len(joined))
        if place == len(joined):
            joined.append(update)
        else:
            update.token_ids[:0] = joined[place].token_ids
            joined[place] = update
    return joined


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
