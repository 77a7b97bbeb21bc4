"""Reads small JSON files of a model directory with a size limit, and checks the links of its
files; errors are `ModelLoadError`."""

import json
import os
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


def resolve_inside(path: Path) -> Path:
    """The path of a file of a model directory with its links resolved. Raises ModelLoadError for a
    link to a file outside the directory, whose contents clients could read.

    Links inside the directory are allowed, and those of the hub cache, where the files of
    <repository>/snapshots/<revision> link to <repository>/blobs.
    """
    if not path.is_symlink():
        return path
    directory, target = path.parent.resolve(), path.resolve()
    allowed = [directory]
    for revision in (directory, *directory.parents):
        if revision.parent.name == "snapshots":
            allowed.append(revision.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in allowed):
        raise ModelLoadError(
            f"{path}: is a link to {target}, outside the model's directory; put the file itself "
            "there"
        )
    return target


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """The content of a file of at most `limit` bytes."""
    resolved = resolve_inside(path)
    try:
        with resolved.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            data = stream.read(min(size, limit) + 1)
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
