"""Logs as one JSON object (or one line of text) per event, on standard error.

What a request said is never in them: events carry ids, names, counts, times and statuses.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
SEPARATORS = frozenset(' ="')  # of the fields of a line


# What ends a line somewhere, or writes over one: controls (ECMA-48), U+2028 and U+2029, and the
# characters that turn the direction of text. Line feed and tab are the formatters' own.
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def shown_as_escapes(text: str) -> str:
    return HIDDEN.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return shown_as_escapes(json.dumps(entry, ensure_ascii=False, default=str))


def _one_word(value: object) -> str:
    """What a client sent must not look like another field or another line."""
    text = str(value)
    return text if text.isprintable() and SEPARATORS.isdisjoint(text) else json.dumps(text)


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.replace("\n", "\\n")
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        line = shown_as_escapes(super().format(record))
        fields = getattr(record, "fields", None)
        if fields:
            pairs = " ".join(f"{key}={_one_word(value)}" for key, value in fields.items())
            first, *rest = line.split("\n")
            line = "\n".join([f"{first} {pairs}", *rest])
        return line


def setup_logging(level: str, log_format: str) -> None:
    """Route everything, uvicorn's own lines included, through one handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("llaisys").setLevel(level.upper())


def level_name() -> str:
    """The level of the package's loggers, as setup_logging takes it: for a child process."""
    level = logging.getLogger("llaisys").getEffectiveLevel()
    return next((name for name in LEVELS if level <= getattr(logging, name.upper())), LEVELS[-1])


def format_name() -> str:
    """The format that setup_logging was called with, or text."""
    handlers = logging.getLogger().handlers
    return "json" if any(isinstance(h.formatter, JsonFormatter) for h in handlers) else "text"


def log_event(logger: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """One event with its fields; None is left out."""
    if logger.isEnabledFor(level):
        known = {key: value for key, value in fields.items() if value is not None}
        logger.log(level, message, extra={"fields": known})
