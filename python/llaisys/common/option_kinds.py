"""The kinds of values that an option takes.

A kind checks a value (`check`), reads one from a command line (`parse`), describes itself to
clients (`json_schema`) and to readers of help and reference pages (`metavar`, `limits`, `shown`).
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.validation import (
    MAX_INT,
    check_bool,
    check_choice,
    check_count,
    check_float,
    check_int,
    check_strings,
    check_text,
    check_token_ids,
    invalid_value,
)

MAX_METAVAR = 24  # characters of the choices of an option in help


class Kind:
    """The values that a field takes."""

    parse: Callable[[str], Any] = str
    metavar: str = "TEXT"  # the value in help
    repeats: bool = False  # the flag may be given several times

    def check(self, name: str, value: Any) -> Any:
        """The value in its plain form; raises InvalidInputError."""
        raise NotImplementedError

    def json_schema(self) -> dict[str, Any]:
        """Of the kinds of request fields only."""
        raise NotImplementedError

    def limits(self) -> str:
        """The accepted values, for reference pages."""
        return "text"

    def shown(self, value: Any) -> str:
        """A value, for help."""
        return str(value)


@dataclass(frozen=True, slots=True)
class Integer(Kind):
    low: int
    high: int = MAX_INT

    parse = int
    metavar = "N"

    def check(self, name: str, value: Any) -> int:
        return check_int(name, value, self.low, self.high)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def limits(self) -> str:
        return (
            f"integer, {self.low} or more" if self.high >= MAX_INT else f"{self.low} to {self.high}"
        )


UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
         "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bytes(Kind):
    """A number of bytes: an integer, or a text like "1.5GiB" or "800M"."""

    low: int
    high: int = 1 << 62

    metavar = "SIZE"

    @staticmethod
    def parse(text: str) -> int | str:
        return int(text) if text.isdecimal() else text

    def check(self, name: str, value: Any) -> int:
        if isinstance(value, str):
            found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kmgt]?i?)b?", value.lower())
            if found is None or found[2] not in UNITS:
                raise invalid_value(
                    name, value, 'a number of bytes like 8000000000, "8GB" or "1.5GiB"'
                )
            whole = found[1].isdigit() and not found[2]
            value = int(found[1]) if whole else int(float(found[1]) * UNITS[found[2]])
        return check_int(name, value, self.low, self.high)

    def limits(self) -> str:
        least = f", {self.shown(self.low)} or more" if self.low > 1 else ""
        return f"bytes, or text like `1.5GiB`{least}"

    def shown(self, value: Any) -> str:
        unit = next((u for u in ("ti", "gi", "mi", "ki") if value and value % UNITS[u] == 0), None)
        return str(value) if unit is None else f"{value // UNITS[unit]}{unit.capitalize()}B"


@dataclass(frozen=True, slots=True)
class Number(Kind):
    low: float
    high: float = math.inf
    above_low: bool = False  # the lower limit itself is rejected

    parse = float
    metavar = "X"

    def check(self, name: str, value: Any) -> float:
        return check_float(name, value, self.low, self.high, above_low=self.above_low)

    def json_schema(self) -> dict[str, Any]:
        least = "exclusiveMinimum" if self.above_low else "minimum"
        most = {"maximum": self.high} if math.isfinite(self.high) else {}
        return {"type": "number", least: self.low, **most}

    def limits(self) -> str:
        least = f"above {self.low:g}" if self.above_low else f"{self.low:g}"
        if math.isinf(self.high):
            return f"number {least}" + ("" if self.above_low else " or more")
        return f"{least} to {self.high:.10g}"

    def shown(self, value: Any) -> str:
        return f"{value:g}"


@dataclass(frozen=True, slots=True)
class Switch(Kind):
    def check(self, name: str, value: Any) -> bool:
        return check_bool(name, value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "boolean"}

    def limits(self) -> str:
        return "`true`, `false`"

    def shown(self, value: Any) -> str:
        return "on" if value else "off"


@dataclass(frozen=True, slots=True)
class Text(Kind):
    may_be_empty: bool = False

    def check(self, name: str, value: Any) -> str:
        return "" if value == "" and self.may_be_empty else check_text(name, value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": int(not self.may_be_empty)}


@dataclass(frozen=True, slots=True)
class FilePath(Kind):
    """The path of a file or a directory."""

    metavar = "FILE"
    parse = Path

    def check(self, name: str, value: Any) -> Path:
        return value if isinstance(value, Path) else Path(check_text(name, value))

    def limits(self) -> str:
        return "path"


@dataclass(frozen=True, slots=True)
class Paths(Kind):
    """Paths of directories; one, or a list."""

    max_count: int = 64

    metavar = "DIR"
    repeats = True

    def check(self, name: str, value: Any) -> tuple[Path, ...]:
        given = value if isinstance(value, (list, tuple)) else [value]
        check_count(name, len(given), self.max_count, "paths")
        return tuple(FilePath().check(name, item) for item in given)

    def limits(self) -> str:
        return "path or a list"


@dataclass(frozen=True, slots=True)
class TextOrFile(Kind):
    """A text that contains `mark`, or the name of a file with such a text. The plain form is the
    text."""

    mark: str
    max_chars: int
    called: str  # in errors

    metavar = "FILE"

    def check(self, name: str, value: Any) -> str:
        text, found = check_text(name, value), ""
        if self.mark not in text:
            found = f" in the file {text}"
            try:
                with open(text, encoding="utf-8") as file:
                    text = file.read(self.max_chars + 1)
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or "it is not UTF-8"
                limit = f"{self.called}, or a file that has one"
                raise InvalidInputError(
                    f"{name} is {text!r}; it must be {limit} ({why})",
                    field=name, value=text, limit=limit,
                ) from None  # fmt: skip
            if self.mark not in text:
                raise invalid_value(name, value, f"a file with {self.called}")
        check_count(f"{name}{found}", len(text), self.max_chars, "characters")
        return text


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    choices: tuple[str, ...]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)  # other names for them

    def check(self, name: str, value: Any) -> str:
        known = value if not isinstance(value, str) else self.aliases.get(value, value)
        return check_choice(name, known, self.choices)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": [*self.choices, *self.aliases]}

    @property
    def metavar(self) -> str:  # type: ignore[override]
        text = "{" + ",".join(self.choices) + "}"
        return text if len(text) <= MAX_METAVAR else "NAME"

    def limits(self) -> str:
        return ", ".join(f"`{name}`" for name in self.choices)


@dataclass(frozen=True, slots=True)
class Toggle(Choice):
    """auto, on or off; true and false are on and off. On a command line, a flag without a value is
    on."""

    choices: tuple[str, ...] = ("auto", "on", "off")

    def check(self, name: str, value: Any) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        return check_choice(name, value, self.choices)


@dataclass(frozen=True, slots=True)
class Strings(Kind):
    """A string or a list of strings; None is none."""

    max_count: int
    max_chars: int

    repeats = True

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        return check_strings(name, value, self.max_count, self.max_chars)

    def limits(self) -> str:
        return f"text or a list of at most {self.max_count}"

    def json_schema(self) -> dict[str, Any]:
        one = {"type": "string", "minLength": 1, "maxLength": self.max_chars}
        return {"anyOf": [one, {"type": "array", "items": one, "maxItems": self.max_count}]}


@dataclass(frozen=True, slots=True)
class Names(Strings):
    """Names, repeated or as a JSON list on the command line; several after one flag with
    `several_words`."""

    max_count: int = 64
    max_chars: int = 1024
    several_words: bool = False

    metavar = "NAME"

    @staticmethod
    def parse(text: str) -> Any:
        return json_or_text(text) if text.startswith("[") else text


@dataclass(frozen=True, slots=True)
class TokenIds(Kind):
    """A list of token ids, each once."""

    max_count: int
    min_count: int = 0

    def limits(self) -> str:
        return f"list of at most {self.max_count} token ids"

    def check(self, name: str, value: Any) -> tuple[int, ...]:
        ids = check_token_ids(name, value, self.max_count, min_count=self.min_count)
        return tuple(dict.fromkeys(ids))

    def json_schema(self) -> dict[str, Any]:
        item = Integer(0).json_schema()
        limits = {"minItems": self.min_count, "maxItems": self.max_count}
        return {"type": "array", "items": item, **limits}


@dataclass(frozen=True, slots=True)
class Integers(Kind):
    """A list of integers from 0 on; "0,1" on the command line."""

    max_count: int = 1024

    metavar = "N,N"

    def limits(self) -> str:
        return "list of integers"

    @staticmethod
    def parse(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def check(self, name: str, value: Any) -> tuple[int, ...]:
        return check_token_ids(name, value, self.max_count)


def json_or_text(text: str) -> Any:
    """The JSON value of a text, or the text itself, which `check` then rejects by name."""
    try:
        return json.loads(text)
    except ValueError:
        return text
