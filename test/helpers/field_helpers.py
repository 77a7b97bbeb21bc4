"""Paths, request parts and readers of answers for tests of fields that the server ignores."""

from __future__ import annotations

import httpx

IGNORED = "x-llaisys-ignored-fields"
STRICT = {"x-llaisys-strict-fields": "true"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
READ_FILE = {
    "name": "read_file",
    "description": "Read a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
FUNCTION = {"type": "function", "function": READ_FILE}


def names(response: httpx.Response) -> set[str]:
    """The fields that the header of a response names as ignored."""
    found = response.headers.get(IGNORED, "")
    return set(found.split(", ")) if found else set()


def message_of(response: httpx.Response) -> str:
    """The text of an error in any protocol."""
    error = response.json()["error"]
    return str(error if isinstance(error, str) else error["message"])
