"""The prompt and the conversation of a request, from its JSON body.

Text is compared in units of four bytes, about a token. Nothing is validated: the replica does.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from llaisys.server.replicas.router import Conversation

UNIT = 4  # bytes
SESSION_HEADER = b"x-session-id"
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
TURNS = ("messages", "input", "prompt")  # fields with the prompt, in the order of preference
HEAD = ("model", "system", "instructions", "tools")  # fields that precede it


@dataclass(frozen=True, slots=True)
class Prompt:
    units: Sequence[int]
    max_tokens: int | None
    choices: int
    conversation: Conversation


def prompt_of(path: str, body: bytes, owner: str, session: str | None) -> Prompt | None:
    """Return the prompt; None for a body without one, or one that needs the state of a replica.
    `owner`: distinguishes API keys. `session`: identifies the conversation; None: its first turn
    does."""
    if path.startswith("/v1/sessions"):
        return None
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    if not isinstance(fields, dict):
        return None
    if path == "/v1/responses" and fields.get("store") is not False:
        return None  # a later request may name the stored response
    turns = next((fields[name] for name in TURNS if fields.get(name)), None)
    if turns is None:
        return None
    head = b"".join(_bytes(fields[name]) for name in HEAD if name in fields)
    units: Sequence[int]
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        texts = [head, *map(_bytes, turns)]
        answers = [index for index, turn in enumerate(turns, 1) if _is_answer(turn)]
        units = _units(b"".join(texts))
        begin = b"".join(texts[: answers[0]] if answers else texts)
        earlier = sum(map(len, texts[: answers[-1] + 1])) // UNIT if answers else 0
    elif isinstance(turns, list) and all(isinstance(token, int) for token in turns):
        units, begin, earlier = turns, _bytes(turns[:256]), 0
    else:
        text = head + _bytes(turns)
        units, begin, earlier = _units(text), text[: 256 * UNIT], 0
    name = session or fields.get("prompt_cache_key") or begin.hex()
    limit = next((fields[key] for key in LIMITS if isinstance(fields.get(key), int)), None)
    choices = fields.get("n")
    return Prompt(
        units,
        max(0, limit) if limit is not None else None,
        choices if isinstance(choices, int) and choices > 0 else 1,
        Conversation(f"{owner}\0{name}", earlier),
    )


def _is_answer(turn: dict[str, Any]) -> bool:
    """Whether a model generated the turn; tool calls of /v1/responses have no role."""
    return turn.get("role", "assistant") == "assistant"


def _bytes(value: Any) -> bytes:
    return (
        value.encode("utf-8", "replace") if isinstance(value, str) else msgspec.json.encode(value)
    )


def _units(text: bytes) -> Sequence[int]:
    return array("I", text[: len(text) // UNIT * UNIT])
