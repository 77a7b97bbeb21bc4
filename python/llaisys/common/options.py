"""Fields that say what they are: a dataclass whose fields are made by `option` is the one table
from which checks, command-line flags, wire forms and JSON schemas derive.

    max_num_seqs: int = option(256, Integer(1, 65536), "sequences that run at once")

A kind checks a value (`check`), reads one from a command line (`parse`) and describes itself to
clients (`json_schema`). None is allowed where it is the field's default.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

_KEY = "llaisys"  # of the field's metadata
_NEVER = object()  # no value is this


class Kind:
    """What values a field takes."""

    parse: Callable[[str], Any] = str

    def check(self, name: str, value: Any) -> Any:
        """The value in its plain form; raises InvalidInputError."""
        raise NotImplementedError

    def json_schema(self) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Integer(Kind):
    low: int
    high: int = MAX_INT

    parse = int

    def check(self, name: str, value: Any) -> int:
        return check_int(name, value, self.low, self.high)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
         "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bytes(Kind):
    """A number of bytes: an integer, or a text like "1.5GiB" or "800M"."""

    low: int
    high: int = 1 << 62

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

    def json_schema(self) -> dict[str, Any]:
        return {"type": ["integer", "string"], "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Number(Kind):
    low: float
    high: float = math.inf
    above_low: bool = False  # the lower limit itself is refused

    parse = float

    def check(self, name: str, value: Any) -> float:
        return check_float(name, value, self.low, self.high, above_low=self.above_low)

    def json_schema(self) -> dict[str, Any]:
        least = "exclusiveMinimum" if self.above_low else "minimum"
        most = {"maximum": self.high} if math.isfinite(self.high) else {}
        return {"type": "number", least: self.low, **most}


@dataclass(frozen=True, slots=True)
class Switch(Kind):
    def check(self, name: str, value: Any) -> bool:
        return check_bool(name, value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Text(Kind):
    may_be_empty: bool = False

    def check(self, name: str, value: Any) -> str:
        return "" if value == "" and self.may_be_empty else check_text(name, value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": int(not self.may_be_empty)}


@dataclass(frozen=True, slots=True)
class TextOrFile(Kind):
    """A text that has `mark` in it, or the name of a file with such a text, whose plain form is the
    text."""

    mark: str
    max_chars: int
    called: str  # in errors

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

    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    choices: tuple[str, ...]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)  # other names for them

    def check(self, name: str, value: Any) -> str:
        known = value if not isinstance(value, str) else self.aliases.get(value, value)
        return check_choice(name, known, self.choices)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": [*self.choices, *self.aliases]}


@dataclass(frozen=True, slots=True)
class Toggle(Kind):
    """auto, on or off; true and false are on and off. On a command line, a flag without a value is
    on."""

    choices: tuple[str, ...] = ("auto", "on", "off")

    def check(self, name: str, value: Any) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        return check_choice(name, value, self.choices)

    def json_schema(self) -> dict[str, Any]:
        return {"enum": [*self.choices, True, False]}


@dataclass(frozen=True, slots=True)
class Strings(Kind):
    """A string or a list of strings; None is none."""

    max_count: int
    max_chars: int

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        return check_strings(name, value, self.max_count, self.max_chars)

    def json_schema(self) -> dict[str, Any]:
        one = {"type": "string", "minLength": 1, "maxLength": self.max_chars}
        return {"anyOf": [one, {"type": "array", "items": one, "maxItems": self.max_count}]}


@dataclass(frozen=True, slots=True)
class TokenIds(Kind):
    """A list of token ids, each once."""

    max_count: int
    min_count: int = 0

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

    @staticmethod
    def parse(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def check(self, name: str, value: Any) -> tuple[int, ...]:
        return check_token_ids(name, value, self.max_count)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "array", "items": Integer(0).json_schema(), "maxItems": self.max_count}


def json_or_text(text: str) -> Any:
    """Text that is not JSON stays what it is, for `check` to refuse by name."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class Record(Kind):
    """The fields of a described dataclass as a mapping, JSON on the command line; its plain form
    has those that differ from their defaults."""

    owner: type[Any]

    parse = staticmethod(json_or_text)

    def check(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise invalid_value(name, value, "an object (a mapping of names to values)")
        return changed(rebuilt(self.owner, value))

    def json_schema(self) -> dict[str, Any]:
        fields = {n: about.kind.json_schema() for n, about, _ in options_of(self.owner)}
        return {"type": "object", "properties": fields, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Option:
    """The description of a field beside its name, its type and its default."""

    kind: Kind
    help: str
    flag: str | None = None  # on the command line; "": the field's name, None: no flag
    # Other names that are accepted, and those that give a warning: in snake case for keywords,
    # configuration files and flags; one that begins with a dash is a flag only.
    aliases: tuple[str, ...] = ()
    deprecated: tuple[str, ...] = ()


def option(
    default: Any,
    kind: Kind,
    help: str,
    *,
    flag: str | None = "",
    aliases: tuple[str, ...] = (),
    deprecated: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with a description; the keywords are the fields of Option."""
    return described(default, Option(kind, help, flag, aliases, deprecated))


def described(default: Any, about: Option) -> Any:
    return dataclasses.field(default=default, metadata={_KEY: about})


def options_of(owner: Any) -> tuple[tuple[str, Option, Any], ...]:
    """(name, description, default) of each described field of a dataclass, in its order."""
    described_class: Any = owner if isinstance(owner, type) else type(owner)
    return _options_of(described_class)


@functools.cache
def _options_of(owner: Any) -> tuple[tuple[str, Option, Any], ...]:
    return tuple(
        (field.name, field.metadata[_KEY], field.default)
        for field in dataclasses.fields(owner)
        if _KEY in field.metadata
    )


@functools.cache
def _checks_of(owner: Any) -> tuple[tuple[str, Kind, Any], ...]:
    """(name, kind, the default as it is when it needs no check) of each described field."""
    found = []
    for name, about, default in _options_of(owner):
        is_plain = default is None or about.kind.check(name, default) is default
        found.append((name, about.kind, default if is_plain else _NEVER))
    return tuple(found)


def check_options(instance: Any) -> None:
    """Check every described field of a frozen dataclass and put in the plain values."""
    owner: Any = type(instance)
    for name, kind, plain in _checks_of(owner):
        value = getattr(instance, name)
        if value is not plain:
            object.__setattr__(instance, name, kind.check(name, value))


def changed(instance: Any) -> dict[str, Any]:
    """The described fields that differ from their defaults: plain data, from which
    `type(instance)(**values)` makes an equal one. The wire form of such a class."""
    found = {}
    for name, _, default in options_of(instance):
        value = getattr(instance, name)
        if value != default and not (default is None and value == ()):
            found[name] = value
    return found


def rebuilt(owner: type[Any], values: Mapping[str, Any], **more: Any) -> Any:
    """An instance from what `changed` gave, and more fields; unknown names raise
    InvalidInputError."""
    known = {name for name, _, _ in options_of(owner)}
    for name in values:
        if name not in known:
            raise InvalidInputError(f"unknown field {name!r} of {owner.__name__}", field=name)
    return owner(**values, **more)
