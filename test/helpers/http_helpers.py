"""The server of the HTTP tests: two keys, two names of a model without weights, a web UI."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from engine_fakes import FakeTokenizer, expected_tokens
from server_helpers import ServerProcess

KEYS = ("key-of-alice", "key-of-bob")
CHAT = "/v1/chat/completions"
# A word of a request that no answer may repeat, and what errors must not contain.
CANARY = "canary-4711"
TELLING = re.compile(
    r"0x[0-9a-f]{4}|Traceback|File \"|\.py\b|llaisys\.|pydantic|msgspec|"
    r"/(root|home|work|tmp|usr|opt)/|" + CANARY
)


@contextlib.contextmanager
def http_server(folder: Path) -> Iterator[ServerProcess]:
    (folder / "ui").mkdir()
    (folder / "ui" / "index.html").write_text("<title>ui</title>")
    (folder / "ui" / "app.js").write_text("export {};")
    options = [item for key in KEYS for item in ("--api-key", key)]
    with ServerProcess(
        *options,
        "--max-body-bytes",
        "100000",
        "--webui",
        str(folder / "ui"),
        "--served-model-name",
        "fake",
        "alias",
        session_file=folder / "sessions.db",
    ) as process:
        yield process.wait_ready()


def chat(**fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}
    return {**body, **fields}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    fields = {"message", "type", "param", "code", "request_id"}
    if error["code"] == "context_length_exceeded" and "n_ctx" in error:
        fields |= {"n_prompt_tokens", "n_ctx"}
    assert set(error) == fields
    assert error["request_id"] == response.headers["x-request-id"]
    return error


def reply(prompt: str, max_tokens: int) -> list[int]:
    return expected_tokens(FakeTokenizer().encode(prompt), max_tokens)
