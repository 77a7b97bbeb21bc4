"""Fields of request bodies that no schema has: one rule for every protocol.

A field that a schema does not have is ignored: it is left out, named in the response header
`IGNORED_HEADER` and in the debug log, and counted. Exceptions:

- `REJECTED`, and `MEDIA` at any depth: fields that change the answer and that this server cannot
  honour. Any value but a neutral one is a 400.
- `ALIASES`: other names of fields that a schema has.

Tools of unsupported types (built-in ones of other servers: web_search, computer_20250124, ...) are
dropped and noted in the same way; a `tool_choice` that needs one of them is an error.

In strict mode (`--strict-fields`, or `STRICT_HEADER` on a request) unknown fields, hints and
aliases are a 400, too.
"""

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from llaisys.common.errors import InvalidInputError

IGNORED_HEADER = "x-llaisys-ignored-fields"
STRICT_HEADER = "x-llaisys-strict-fields"  # of a request: 1 or true
MAX_NAMED = 32  # names in the header
_SHOWN_NAME = re.compile(r"[A-Za-z0-9_.=\[\]-]{1,64}")

UNSUPPORTED = "unsupported"  # error code of rejected fields
NEVER = "is not supported by this server"
CHATS_ONLY = "is a field of chats"

# field -> (reason, neutral values that are accepted)
REJECTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tools": (CHATS_ONLY, (None, [])),
    "tool_choice": (CHATS_ONLY, (None, "none", "auto")),
    "functions": (f"{NEVER}; use tools", (None, [])),
    "function_call": (f"{NEVER}; use tool_choice", (None, "none")),
    "suffix": ("is a field of completions", (None, "")),
    "modalities": (NEVER, (None, ["text"])),
    "chat_template": ("is not taken from requests", (None,)),
    "documents": (NEVER, (None, [])),
    "truncate_prompt_tokens": ("is not supported: inputs are never cut", (None,)),
    "truncation_side": ("is not supported: inputs are never cut", (None, "left")),
    "prompt_embeds": (NEVER, (None,)),
    "spaces_between_special_tokens": (NEVER, (None, True)),
    "vllm_xargs": (NEVER, (None,)),
    "kv_transfer_params": (NEVER, (None,)),
    "t_max_predict_ms": (NEVER, (None, 0, -1)),
    "lora": ("is not a field of this route; model may name an adapter", (None, [])),
}

TEXT_ONLY = "is not supported: this is a text model"
NO_MEDIA: tuple[Any, ...] = (None, [], {}, "")
# Rejected in every object of a body, like `REJECTED`: content that is not text.
MEDIA: dict[str, tuple[str, tuple[Any, ...]]] = {
    **{
        name: (TEXT_ONLY, NO_MEDIA)
        for name in (
            *("audio", "input_audio", "audio_url", "file", "files", "input_file"),
            *("image", "images", "image_url", "image_urls", "image_data", "input_image"),
            *("video", "videos", "video_url", "multimodal_data"),
        )
    },
    "refusal": (NEVER, (None, "")),
}
REJECTED_AT_TOP = REJECTED | MEDIA

# Hint -> neutral values, which are neither listed nor rejected by `--strict-fields`.
HINTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            # OpenAI
            *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction"),
            *("verbosity", "moderation"),
            "web_search_options",  # a built-in tool, dropped like those in `tools`
            # OpenAI, of chats: hints elsewhere
            *("parallel_tool_calls", "reasoning_effort", "reasoning", "thinking"),
            "enable_thinking",
            # vLLM
            *("guided_decoding_backend", "guided_whitespace_pattern", "mm_processor_kwargs"),
            "media_io_kwargs",
            # llama.cpp
            *("speculative.n_max", "speculative.n_min", "speculative.p_min"),
            # Ollama, LM Studio, OpenRouter, Open WebUI and others
            *("keep_alive", "num_ctx", "ttl", "provider", "route", "usage", "chat_id"),
            *("conversation_id", "background_tasks", "features", "model_item", "litellm_params"),
        ),
        (None,),
    ),
    "metadata": (None, {}),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "annotations": (None, []),  # of a message
    "client_metadata": (None, {}),  # Codex
    "include_reasoning": (None, True),
    "context_management": (None, {}),  # Anthropic
    "defer_loading": (None, False),  # Anthropic, of a tool: all tools are in the prompt
    # llama.cpp: placement and speed
    "n_discard": (None, 0),
    "n_cache_reuse": (None, 0),
    "n_indent": (None, 0),
    "t_max_prompt_ms": (None, 0, -1),
    "return_progress": (None, False),
    "min_keep": (None, 0),
    "transforms": (None, []),  # OpenRouter
}

# Alias -> field name.
ALIASES = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "cache_prompt": "reuse_prefix",
    "typ_p": "typical_p",
    "mirostat_mode": "mirostat",
    "thinking_token_budget": "thinking_budget",
    "thinking_budget_tokens": "thinking_budget",
    "max_reasoning_tokens": "thinking_budget",
}

Reasons = Mapping[str, tuple[str, tuple[Any, ...]]]  # as REJECTED


class Ignored(StrEnum):
    """Why something was ignored; the label of the metric."""

    UNKNOWN = "unknown"  # no schema has this name
    HINT = "hint"  # a field of another server or protocol, without effect here
    TOOL = "tool"  # a tool of a type that this server does not have
    REASONING = "reasoning"  # the model's reasoning cannot be controlled this way
    CAPPED = "capped"  # more tokens than the context has room for; shown with the number used


@dataclass(slots=True)
class FieldNotes:
    """The ignored fields of one request; the context of its body's validation."""

    strict: bool = False
    ignored: dict[str, None] = field(default_factory=dict)  # paths, in order, MAX_NAMED at most
    counts: Counter[Ignored] = field(default_factory=Counter)

    def ignore(self, path: str, kind: Ignored = Ignored.UNKNOWN) -> None:
        """Note a field by its path. A path that a header cannot show is counted only."""
        if path in self.ignored:
            return
        self.counts[kind] += 1
        if _SHOWN_NAME.fullmatch(path) and len(self.ignored) < MAX_NAMED:
            self.ignored[path] = None

    @property
    def header(self) -> str:
        return ", ".join(self.ignored)


def is_strict_header(header: str | None) -> bool:
    """Whether a request's `STRICT_HEADER` enables strict mode."""
    return header is not None and header.strip().lower() in ("1", "true")


def is_among(value: Any, neutral: Iterable[Any]) -> bool:
    """Whether a value is one of the neutral ones; 0 and False differ."""
    return any(type(value) is type(item) and value == item for item in neutral)


def filter_fields(
    data: dict[str, Any],
    known: Collection[str],
    notes: FieldNotes,
    prefix: str,
    *,
    rejected: Reasons | None = None,
    own_aliases: bool = False,
) -> dict[str, Any]:
    """Return the fields of an object that its schema validates; add the others to `notes`.

    Fields that must be rejected stay, so that the schema rejects them. `prefix`: path of the
    object. `rejected`: further fields, rejected here. `own_aliases`: hints and aliases are names of
    this API, so strict mode accepts them."""
    kept: dict[str, Any] = {}
    others: dict[str, Any] = {}
    reasons = MEDIA if prefix else REJECTED_AT_TOP
    for name, value in data.items():
        if name in known:
            kept[name] = value
        elif rejected is not None and name in rejected:
            if not is_among(value, rejected[name][1]):
                raise unsupported(prefix + name, rejected[name][0])
        elif name in reasons:
            if not is_among(value, reasons[name][1]):
                kept[name] = value
        elif name in HINTS and is_among(value, HINTS[name]):
            pass
        elif notes.strict and not (own_aliases and (name in HINTS or name in ALIASES)):
            kept[name] = value
        elif ALIASES.get(name) in known:
            if value is not None:
                others[name] = value
        else:
            notes.ignore(prefix + name, Ignored.HINT if name in HINTS else Ignored.UNKNOWN)
    for name, value in others.items():
        field = ALIASES[name]
        if kept.get(field) is None:
            kept[field] = value
        elif kept[field] != value:
            raise InvalidInputError(
                f"{name} and {field} are the same field and have different values", field=name
            )
    return kept


def filter_object(given: Any, known: Collection[str], notes: FieldNotes, path: str) -> Any:
    """`filter_fields` for an object without a schema. Other values are returned unchanged. Raises
    InvalidInputError for fields that a schema would reject."""
    if not isinstance(given, dict):
        return given
    kept = filter_fields(given, known, notes, f"{path}.")
    for name in kept:
        if name not in known:
            raise field_error(f"{path}.{name}", name, known)
    return kept


def field_error(path: str, name: str, known: Iterable[str]) -> InvalidInputError:
    """Return the error for a field that the object does not have."""
    if name in REJECTED_AT_TOP:
        return unsupported(path, REJECTED_AT_TOP[name][0])
    if name in HINTS or name in ALIASES:
        return unsupported(
            path,
            "is not a field of this server, and unknown fields are rejected (--strict-fields or "
            f"the header {STRICT_HEADER})",
        )
    near = difflib.get_close_matches(name.lower(), list(known), 1, 0.8)
    text = f"unknown field {path!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    return InvalidInputError(text, field=path, code="unknown_field")


def unsupported(path: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"{path} {why}", field=path, code=UNSUPPORTED)


# A type that an error or the header may repeat: words and a date.
_TYPE = re.compile(r"(?=.{1,40}$)[a-z]+(_[a-z]+)*(_[0-9]{2,8})*")
FORCED = ("required", "any")  # at least one call, for OpenAI and Anthropic


def drop_tools(data: dict[str, Any], types: frozenset[str], notes: FieldNotes) -> dict[str, Any]:
    """Return the body without the tools whose `type` is a string outside `types`. Raises
    InvalidInputError when the choice needs one of them. In strict mode all stay, so that the schema
    rejects them."""
    tools = data.get("tools")
    if notes.strict or not isinstance(tools, list):
        return data
    kept: list[Any] = []
    dropped: dict[int, dict[str, Any]] = {}
    for number, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in types:
            dropped[number] = tool
            notes.ignore(f"tools[{number}].type={printable_type(kind)}", Ignored.TOOL)
        else:
            kept.append(tool)
    if not dropped:
        return data
    check_choice(data.get("tool_choice"), kept, dropped)
    return {**data, "tools": kept}


def printable_type(kind: str) -> str:
    return kind if _TYPE.fullmatch(kind) else "other"


def check_choice(choice: Any, kept: list[Any], dropped: dict[int, dict[str, Any]]) -> None:
    """Raises InvalidInputError when the choice needs a tool that was dropped."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    types = ", ".join(sorted({printable_type(tool["type"]) for tool in dropped.values()}))
    if kind in FORCED and not kept:
        raise _choice_error(
            f"{kind}; it must be auto or none: this server has no tools of type {types}"
        )
    if not isinstance(choice, dict):
        return
    if kind == "allowed_tools":  # named tools are checked with the others
        return
    name = name_of(choice)
    if name is not None and name in {name_of(tool) for tool in kept}:
        return
    for number, tool in dropped.items():
        if kind == tool["type"] or (name is not None and name == name_of(tool)):
            raise _choice_error(
                f"tools[{number}] of type {printable_type(tool['type'])}, which this server does "
                "not have; it must be another tool of the request"
            )


def name_of(tool: Any) -> str | None:
    """Return the name of a tool or a choice in the format of any API."""
    if not isinstance(tool, dict):
        return None
    for holder in (tool, tool.get("function"), tool.get("custom")):
        if isinstance(holder, dict) and isinstance(holder.get("name"), str):
            return str(holder["name"])
    return None


def _choice_error(text: str) -> InvalidInputError:
    return InvalidInputError(f"tool_choice is {text}", field="tool_choice", code=UNSUPPORTED)
