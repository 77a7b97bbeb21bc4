"""Logging: one JSON object or one line of text per event, on standard error.

Events contain ids, names, counts, times and statuses, never the content of requests.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

DEVICE_LOGGER = "llaisys.device"  # a record per engine: the device, the reason, `model`
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
SEPARATORS = frozenset(' ="')  # of the fields of a line


# Characters that end or overwrite a line: controls (ECMA-48), U+2028, U+2029 and bidirectional
# controls. Line feed and tab are allowed.
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
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
        return escape_controls(json.dumps(entry, ensure_ascii=False, default=str))


def _one_word(value: object) -> str:
    """Quote a value that could look like another field or line."""
    text = str(value)
    return text if text.isprintable() and SEPARATORS.isdisjoint(text) else json.dumps(text)


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.replace("\n", "\\n")
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        line = escape_controls(super().format(record))
        fields = getattr(record, "fields", None)
        if fields:
            pairs = " ".join(f"{key}={_one_word(value)}" for key, value in fields.items())
            first, *rest = line.split("\n")
            line = "\n".join([f"{first} {pairs}", *rest])
        return line


def setup_logging(level: str, log_format: str) -> None:
    """Route all loggers, including uvicorn's, through one handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("llaisys").setLevel(level.upper())


@contextmanager
def show_devices(out: TextIO) -> Iterator[None]:
    """Print the model, the device and the reason of every engine that is opened in this block."""
    logger, handler = logging.getLogger(DEVICE_LOGGER), _DeviceHandler(out)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _DeviceHandler(logging.Handler):
    """One line per model and device; a device that is set is not reported again as requested."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out
        self._shown: set[tuple[str, object]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        model = getattr(record, "model", "")
        key = (text.partition(":")[0], model)
        if key not in self._shown:
            self._shown.add(key)
            line = f"model {model}, {text}"
            # A line of progress that it replaces may be longer.
            print(line.ljust(79) if self._out.isatty() else line, file=self._out, flush=True)


def level_name() -> str:
    """Return the level of the package's loggers for setup_logging of a child process."""
    level = logging.getLogger("llaisys").getEffectiveLevel()
    return next((name for name in LEVELS if level <= getattr(logging, name.upper())), LEVELS[-1])


def format_name() -> str:
    """Return the format given to setup_logging, or "text"."""
    handlers = logging.getLogger().handlers
    return "json" if any(isinstance(h.formatter, JsonFormatter) for h in handlers) else "text"


def log_event(logger: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Log one event with its fields; None values are omitted."""
    if logger.isEnabledFor(level):
        known = {key: value for key, value in fields.items() if value is not None}
        logger.log(level, message, extra={"fields": known})
