"""Reading small JSON files of a model directory: size capped, every fault a `ModelLoadError`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llaisys.common.errors import ModelLoadError

MAX_JSON_BYTES = 64 * 1024 * 1024


def parse_json_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Parse `text` as one JSON object; `where` names it in the error."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """The whole content of a file of at most `limit` bytes."""
    try:
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > limit:
        raise ModelLoadError(f"{path}: larger than the limit of {limit} bytes")
    return data


def read_json_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    return parse_json_object(read_bytes(path, limit), str(path))


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """Like `read_json_object`, but an absent file is an empty object."""
    return read_json_object(path) if path.is_file() else {}
