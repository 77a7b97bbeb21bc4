"""Names that clients send and that no schema has.

A field of the OpenAI or vLLM API that this server does not have is in `REFUSED`: any value but a
neutral one is a 400 that says so. A name that nobody knows is a 400 too.
"""

from __future__ import annotations

from typing import Any

UNSUPPORTED = "unsupported"  # the code of what is refused by name
NOT_YET = "is not supported by this server yet"
NEVER = "is not supported by this server"

# field -> (why it is refused, the values that mean "not used" and are let through)
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tools": (NOT_YET, (None, [])),
    "tool_choice": (NOT_YET, (None, "none")),
    "parallel_tool_calls": (NOT_YET, (None,)),
    "functions": (NOT_YET, (None, [])),
    "function_call": (NOT_YET, (None, "none")),
    "response_format": (NOT_YET, (None, {"type": "text"})),
    "structured_outputs": (NOT_YET, (None,)),
    "guided_json": (NOT_YET, (None,)),
    "guided_regex": (NOT_YET, (None,)),
    "guided_choice": (NOT_YET, (None,)),
    "guided_grammar": (NOT_YET, (None,)),
    "grammar": (NOT_YET, (None,)),
    "json_schema": (NOT_YET, (None,)),
    "prompt_logprobs": (NOT_YET, (None,)),
    "logprob_token_ids": (NOT_YET, (None,)),
    "suffix": (NOT_YET, (None, "")),
    "audio": (NEVER, (None,)),
    "modalities": (NEVER, (None, ["text"])),
    "prediction": (NEVER, (None,)),
    "web_search_options": (NEVER, (None,)),
    "reasoning_effort": (NEVER, (None,)),
    "verbosity": (NEVER, (None,)),
    "service_tier": (NEVER, (None, "auto", "default")),
    "store": (NEVER, (None, False)),
    "metadata": (NEVER, (None, {})),
    "moderation": (NEVER, (None,)),
    "prompt_cache_key": (f"{NEVER}; use cache_salt", (None,)),
    "prompt_cache_retention": (NEVER, (None,)),
    "safety_identifier": (f"{NEVER}; use user", (None,)),
    "chat_template": ("is not taken from requests", (None,)),
    "documents": (NEVER, (None, [])),
    "use_beam_search": (NEVER, (None, False)),
    "length_penalty": (NEVER, (None, 1, 1.0)),
    "truncate_prompt_tokens": ("is not supported: prompts are never cut", (None,)),
    "truncation_side": ("is not supported: prompts are never cut", (None,)),
    "prompt_embeds": (NEVER, (None,)),
    "priority": (NEVER, (None, 0)),
    "spaces_between_special_tokens": (NEVER, (None, True)),
    "mm_processor_kwargs": (NEVER, (None,)),
    "media_io_kwargs": (NEVER, (None,)),
    "vllm_xargs": (NEVER, (None,)),
    "kv_transfer_params": (NEVER, (None,)),
    "thinking_token_budget": (NEVER, (None,)),
    "include_reasoning": (NEVER, (None, True)),
    "best_of": (f"{NEVER}; use n", (None, 1)),
    # parts of a message
    "tool_calls": (NOT_YET, (None, [])),
    "tool_call_id": (NOT_YET, (None,)),
    "refusal": (NEVER, (None,)),
    "annotations": (NEVER, (None, [])),
    "reasoning_content": (NEVER, (None,)),
    "reasoning": (NEVER, (None,)),
}


def is_neutral(name: str, value: Any) -> bool:
    """Whether a refused field's value means that it is not used; 0 and False are not the same."""
    return any(type(value) is type(item) and value == item for item in REFUSED[name][1])
