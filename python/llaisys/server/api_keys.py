"""An API key with its name and budgets, and the key file (--api-key-file).

    sk-plain-old-key
    {"key": "sk-...", "name": "team-a", "requests_per_minute": 60, "tokens_per_minute": 20000}

A line of the file is a key, or a JSON object with the fields of `ApiKey`. Empty lines and lines
that start with # are ignored. Error messages name the line, never the key.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.options import Integer, Kind, Switch, check_options, option, options_of
from llaisys.common.validation import invalid_value, unknown_name

MAX_KEY_CHARS = 512
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One client. Logs and metrics show `name`, never the key."""

    key: str = field(repr=False)
    name: str = ""  # empty: `named_keys` assigns one
    requests_per_minute: int | None = option(None, Integer(1), "Requests per minute")
    tokens_per_minute: int | None = option(
        None, Integer(1), "Prompt and generated tokens per minute"
    )
    max_concurrent: int | None = option(None, Integer(1), "Maximum open sequences")
    admin: bool = option(False, Switch(), "Load and unload LoRA adapters")
    from_file: bool = False  # reloaded on SIGHUP

    def __post_init__(self) -> None:
        key = self.key
        if not isinstance(key, str) or not key.isascii() or not 0 < len(key) <= MAX_KEY_CHARS:
            raise InvalidInputError(
                f"an API key must have 1 to {MAX_KEY_CHARS} ASCII characters", field="api_keys"
            )
        if not isinstance(self.name, str) or (self.name and not NAME.fullmatch(self.name)):
            raise invalid_value("name", self.name, f"a string like {NAME.pattern}")
        check_options(self)


def named_keys(given: Iterable[str | ApiKey]) -> tuple[ApiKey, ...]:
    """Return the distinct keys, each with a unique name: unnamed keys become key1, key2, ... by
    position. Of duplicates the named one is used. Raises InvalidInputError for duplicate names."""
    found: dict[str, ApiKey] = {}
    for item in given:
        item = item if isinstance(item, ApiKey) else ApiKey(item)
        before = found.get(item.key)
        if before is not None and before.name and item.name and before != item:
            raise InvalidInputError(
                f"the API keys named {before.name} and {item.name} are the same", field="api_keys"
            )
        if before is None or not before.name:
            found[item.key] = item
    keys = [
        item if item.name else replace(item, name=f"key{number}")
        for number, item in enumerate(found.values(), 1)
    ]
    names = [item.name for item in keys]
    for name in names:
        if names.count(name) > 1:
            raise InvalidInputError(f"two API keys are named {name}", field="api_keys")
    return tuple(keys)


class ApiKeys(Kind):
    """API keys as text or ApiKey; the plain form is ApiKey. No error repeats a key."""

    metavar = "KEY"
    repeats = True

    def check(self, name: str, value: Any) -> tuple[ApiKey, ...]:
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, Iterable):
            raise InvalidInputError(f"{name} must be text or a list of texts", field=name)
        return tuple(key if isinstance(key, ApiKey) else ApiKey(key) for key in given)

    def json_schema(self) -> dict[str, Any]:
        return {"type": ["string", "array"]}

    def limits(self) -> str:
        return "text or a list"


def read_key_file(path: Path) -> list[ApiKey]:
    """Read the key file. Raises InvalidInputError with file and line, also if it has no keys."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidInputError(f"--api-key-file {path}: {reason}", field="api_key_file") from None
    keys = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            keys.append(replace(_read_line(text), from_file=True))
        except InvalidInputError as error:
            raise InvalidInputError(
                f"--api-key-file {path} line {number}: {error}", field="api_key_file"
            ) from None
    if not keys:
        raise InvalidInputError(f"--api-key-file {path} has no key in it", field="api_key_file")
    return keys


FIELDS = ("key", "name", *[name for name, _, _ in options_of(ApiKey)])


def _read_line(text: str) -> ApiKey:
    if not text.startswith("{"):
        return ApiKey(text)
    try:
        values: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidInputError(
            "it starts like a JSON object but is not valid JSON", field="api_key_file"
        ) from None
    for name in values:
        if name not in FIELDS:
            raise InvalidInputError(unknown_name("field", name, FIELDS), field=name)
    if "key" not in values:
        raise InvalidInputError('there is no "key"', field="key")
    return ApiKey(**values)
