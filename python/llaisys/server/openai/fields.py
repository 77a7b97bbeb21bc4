"""Names that clients send and that no schema has.

What would change the answer is in `REFUSED`: any value but a neutral one is a 400 that says so.
What is only a hint is in `HINTS`: it is left out and named in the response header `IGNORED_HEADER`.
Other names of fields that we have are in `ALIASES`. A name that nobody knows is a 400. A server
with `--strict-fields` refuses hints and aliases, too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.validation import invalid_value

IGNORED_HEADER = "x-llaisys-ignored-fields"
MAX_NAMED = 32  # names in the header
_SHOWN_NAME = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")

UNSUPPORTED = "unsupported"  # the code of what is refused by name
NOT_YET = "is not supported by this server yet"
NEVER = "is not supported by this server"
CHATS_ONLY = "is a field of chats"

# field -> (why it is refused, the values that mean "not used" and are let through)
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tools": (CHATS_ONLY, (None, [])),
    "tool_choice": (CHATS_ONLY, (None, "none", "auto")),
    "parallel_tool_calls": (CHATS_ONLY, (None,)),
    "reasoning_effort": (CHATS_ONLY, (None,)),
    "include_reasoning": (CHATS_ONLY, (None, True)),
    "functions": (f"{NEVER}; use tools", (None, [])),
    "function_call": (f"{NEVER}; use tool_choice", (None, "none")),
    "suffix": ("is a field of completions", (None, "")),
    "audio": (NEVER, (None,)),
    "modalities": (NEVER, (None, ["text"])),
    "web_search_options": (NEVER, (None,)),
    "moderation": (NEVER, (None,)),
    "chat_template": ("is not taken from requests", (None,)),
    "documents": (NEVER, (None, [])),
    "use_beam_search": (NEVER, (None, False)),
    "length_penalty": (NEVER, (None, 1, 1.0)),
    "truncate_prompt_tokens": ("is not supported: prompts are never cut", (None,)),
    "truncation_side": ("is not supported: prompts are never cut", (None,)),
    "prompt_embeds": (NEVER, (None,)),
    "spaces_between_special_tokens": (NEVER, (None, True)),
    "vllm_xargs": (NEVER, (None,)),
    "kv_transfer_params": (NEVER, (None,)),
    "best_of": (f"{NEVER}; use n", (None, 1)),
    # samplers of llama.cpp
    "mirostat": (NEVER, (None, 0)),
    "dynatemp_range": (NEVER, (None, 0, 0.0)),
    "dry_multiplier": (NEVER, (None, 0, 0.0)),
    "t_max_predict_ms": (NEVER, (None, 0, -1)),
    "post_sampling_probs": (f"{NEVER}; n_probs are the model's own", (None, False)),
    "lora": (NEVER, (None, [])),
    # parts of a message
    "refusal": (NEVER, (None,)),
}


# Hint -> the values that say nothing: those are neither listed nor refused by `--strict-fields`.
HINTS: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "metadata": (None, {}),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "safety_identifier": (None,),
    "prompt_cache_key": (None,),
    "prompt_cache_retention": (None,),
    "prediction": (None,),
    "verbosity": (None,),
    "annotations": (None, []),  # of a message
    # vLLM
    "mm_processor_kwargs": (None,),
    "media_io_kwargs": (None,),
    # llama.cpp: where and how fast, not what
    "id_slot": (None, -1),
    "n_discard": (None, 0),
    "n_cache_reuse": (None, 0),
    "n_indent": (None, 0),
    "t_max_prompt_ms": (None, 0, -1),
    "return_progress": (None, False),
    "speculative.n_max": (None,),
    "speculative.n_min": (None,),
    "speculative.p_min": (None,),
    # llama.cpp: what tunes a sampler that is off (switched on, it is refused)
    "min_keep": (None, 0),
    "dynatemp_exponent": (None,),
    "mirostat_tau": (None,),
    "mirostat_eta": (None,),
    "dry_base": (None,),
    "dry_allowed_length": (None,),
    "dry_penalty_last_n": (None,),
    "dry_sequence_breakers": (None,),
    "repeat_last_n": (None, -1),  # refused beside a penalty: see `check_window`
    # Ollama, LM Studio, OpenRouter, Open WebUI and others that put a server's own words into a body
    "keep_alive": (None,),
    "num_ctx": (None,),
    "ttl": (None,),
    "provider": (None,),
    "route": (None,),
    "transforms": (None, []),
    "usage": (None,),
    "chat_id": (None,),
    "conversation_id": (None,),
    "background_tasks": (None,),
    "features": (None,),
    "model_item": (None,),
    "litellm_params": (None,),
}

# Another name of a field -> its name here.
ALIASES = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "cache_prompt": "reuse_prefix",
    "typ_p": "typical_p",
    "thinking_token_budget": "thinking_budget",
    "max_reasoning_tokens": "thinking_budget",
}


def is_neutral(name: str, value: Any) -> bool:
    """Whether a field's value means that it is not used; 0 and False are not the same."""
    neutral = REFUSED[name][1] if name in REFUSED else HINTS[name]
    return any(type(value) is type(item) and value == item for item in neutral)


@dataclass(slots=True)
class FieldNotes:
    """What became of one body's fields; the context of its validation."""

    strict: bool = False
    ignored: dict[str, None] = field(default_factory=dict)  # paths, in their order

    def ignore(self, path: str) -> None:
        if _SHOWN_NAME.fullmatch(path) and len(self.ignored) < MAX_NAMED:
            self.ignored[path] = None

    @property
    def header(self) -> str:
        return ", ".join(self.ignored)


def note_ignored(scope: MutableMapping[str, Any], name: str) -> None:
    """Name a field in the header that turned out to be a hint after its body was checked."""
    before = scope["state"].get("ignored_fields")
    scope["state"]["ignored_fields"] = f"{before}, {name}" if before else name


def sift(
    data: dict[str, Any], known: Iterable[str], notes: FieldNotes, prefix: str, takes_any: bool
) -> dict[str, Any]:
    """The fields to validate: those of the schema, and what must be refused. `prefix`: of the
    object's path; `takes_any`: any name that is neither known nor refused is a hint."""
    known, kept, others = set(known), {}, {}
    for name, value in data.items():
        if name in known:
            kept[name] = value
        elif name in REFUSED:
            if not is_neutral(name, value):
                kept[name] = value
        elif name in HINTS and is_neutral(name, value):
            pass
        elif notes.strict:
            kept[name] = value
        elif ALIASES.get(name) in known:
            if value is not None:
                others[name] = value
        elif name in HINTS or takes_any:
            notes.ignore(prefix + name)
        else:
            kept[name] = value
    for name, value in others.items():
        meant = ALIASES[name]
        if kept.get(meant) is None:
            kept[meant] = value
        elif kept[meant] != value:
            raise _contradiction(name, meant)
    if not prefix:
        check_window(data, notes)
    return kept


def _contradiction(name: str, meant: str) -> InvalidInputError:
    return InvalidInputError(
        f"{name} and {meant} are the same field and have different values", field=name
    )


def check_window(data: dict[str, Any], notes: FieldNotes) -> None:
    """Penalties look at the whole text here: another window beside one would change the answer."""
    window = data.get("repeat_last_n")
    if notes.strict or window in (None, -1):
        return
    penalty = data.get("repeat_penalty", data.get("repetition_penalty"))
    if penalty not in (None, 1) or data.get("presence_penalty") or data.get("frequency_penalty"):
        limit = "left out or -1 beside a penalty: the whole text counts here"
        raise invalid_value("repeat_last_n", window, limit, code=UNSUPPORTED)


def unknown_text(path: str, name: str, known: Iterable[str]) -> str:
    """The refusal of a name that nobody knows, with the nearest one that there is."""
    near = difflib.get_close_matches(name.lower(), list(known), 1, 0.8)
    return f"unknown field {path!r}" + (f"; did you mean {near[0]!r}?" if near else "")
