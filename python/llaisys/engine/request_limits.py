"""Maximum length of a request."""

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
    """Return the maximum number of prompt and output tokens.

    max_tokens is capped by the context (finish reason `length`). InvalidInputError: the prompt
    leaves no room for one token, or the whole KV cache is too small for the total. With
    `context_shift` the output has up to max_tokens tokens, or one context without max_tokens.
    """
    num_prompt, max_tokens = request.num_prompt_tokens, request.sampling.max_tokens
    pool = num_blocks * block_size
    # The last sampled token is never computed, so it needs no slot.
    limit = min(max_model_len, pool + 1)
    if not request.sampling.generates:
        limit = min(max_model_len, pool) + 1
    if num_prompt < 1:
        raise invalid_count("prompt", 0, "tokens", "at least 1")
    if num_prompt >= limit:
        what = "max_model_len" if max_model_len <= limit else "the KV cache"
        more = " beside a new token" if request.sampling.generates else ""
        length = min(max_model_len, pool)
        most = (
            f"at most {limit - 1}, as {what} holds{more}: the maximum context length is {length} "
            "tokens"
        )
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
            f"lower max_tokens or raise kv_cache_memory_bytes",
            field="max_tokens",
            value=max_tokens,
            limit=f"at most {limit - num_prompt}",
        )
    return total
