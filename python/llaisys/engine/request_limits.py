"""How long a request may become, or why it can never fit."""

from __future__ import annotations

from llaisys.common.errors import CONTEXT_LENGTH_EXCEEDED, InvalidInputError
from llaisys.common.request import Request
from llaisys.common.validation import invalid_count


def total_tokens_limit(
    request: Request,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
    context_shift: bool = False,
) -> int:
    """Prompt and output tokens that the request may have.

    max_tokens beyond the context is cut to it (finish reason `length`); a prompt that leaves no
    room for one token, or a total that the whole KV cache cannot hold, is refused. With
    `context_shift` the output may be as long as max_tokens says, or as the context without it.
    """
    num_prompt, max_tokens = request.num_prompt_tokens, request.sampling.max_tokens
    pool = num_blocks * block_size
    # The last token drawn is never computed, so it needs no slot.
    limit = min(max_model_len, pool + 1)
    if not request.sampling.generates:  # room for the prompt is room enough
        limit = min(max_model_len, pool) + 1
    if num_prompt < 1:
        raise invalid_count("prompt", 0, "tokens", "at least 1")
    if num_prompt >= limit:
        what = "max_model_len" if max_model_len <= limit else "the KV cache"
        more = " beside a new token" if request.sampling.generates else ""
        most = f"at most {limit - 1}, as {what} holds{more}"
        raise invalid_count("prompt", num_prompt, "tokens", most, code=CONTEXT_LENGTH_EXCEEDED)
    if context_shift:
        return num_prompt + (max_model_len if max_tokens is None else max_tokens)
    if max_tokens is None:
        return limit
    total = min(num_prompt + max_tokens, max_model_len)
    if total > limit:
        raise InvalidInputError(
            f"prompt has {num_prompt} tokens and max_tokens is {max_tokens}: {total - 1} token "
            f"slots are needed, the KV cache has {pool} ({num_blocks} blocks of {block_size}); "
            f"lower max_tokens or raise kv_cache_memory",
            field="max_tokens",
            value=max_tokens,
            limit=f"at most {limit - num_prompt}",
        )
    return total
