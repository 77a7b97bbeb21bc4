"""Options as fields of dataclasses: one declaration gives the check, the keyword of `LLM`, the
command-line flag, the key of the configuration file, the wire form, the JSON schema and the row of
the reference page.

    max_num_seqs: int = option(256, Integer(1, 65536), "Maximum running sequences")

None is allowed where it is the field's default.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llaisys.common.errors import InvalidInputError

# isort: off
# Exported from here too.
from llaisys.common.option_kinds import (
    Bytes as Bytes,
    Choice as Choice,
    FilePath as FilePath,
    Integer as Integer,
    Integers as Integers,
    Kind as Kind,
    Names as Names,
    Number as Number,
    Paths as Paths,
    Strings as Strings,
    Switch as Switch,
    Text as Text,
    TextOrFile as TextOrFile,
    Toggle as Toggle,
    TokenIds as TokenIds,
    json_or_text as json_or_text,
)

# isort: on
from llaisys.common.validation import invalid_value

_KEY = "llaisys"  # of the field's metadata
_NEVER = object()  # no value is this

# Group -> its title in help and reference pages, in their order.
GROUPS = {
    "model": "model",
    "server": "server",
    "device": "device and memory",
    "parallel": "parallelism",
    "lora": "LoRA adapters",
    "scheduling": "scheduling",
    "sampling": "sampling",
    "security": "security",
    "limits": "limits",
    "models": "several models",
    "health": "engine health",
    "observability": "observability",
}


@dataclass(frozen=True, slots=True)
class Record(Kind):
    """The fields of a described dataclass as a mapping, JSON on the command line; its plain form
    has those that differ from their defaults."""

    owner: type[Any]

    parse = staticmethod(json_or_text)
    metavar = "JSON"

    def limits(self) -> str:
        return f"object with the fields of {self.owner.__name__}"

    def check(self, name: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise invalid_value(name, value, "an object (a mapping of names to values)")
        return changed(rebuilt_field(self.owner, name, value))

    def json_schema(self) -> dict[str, Any]:
        fields = {n: about.kind.json_schema() for n, about, _ in options_of(self.owner)}
        return {"type": "object", "properties": fields, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class JsonObject(Kind):
    """A mapping of names to JSON values."""

    parse = staticmethod(json_or_text)
    metavar = "JSON"

    def limits(self) -> str:
        return "object"

    def check(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise invalid_value(name, value, "an object (a mapping of names to values)")
        return dict(value)


@dataclass(frozen=True, slots=True)
class Option:
    """The description of a field beside its name, its type and its default."""

    kind: Kind
    help: str  # one line: a noun phrase or an imperative
    flag: str | None = None  # on the command line; "": the field's name, None: no flag
    group: str = ""  # of GROUPS
    common: bool = False  # shown by --help; else by --help-all only
    default_text: str = ""  # the default in words, where the value says too little
    metavar: str = ""  # the value in help; "": the kind's
    more: str = ""  # further sentences for the reference page
    # Other names that are accepted, and those that give a warning: in snake case for keywords,
    # configuration files and flags; one that begins with a dash is a flag only.
    aliases: tuple[str, ...] = ()
    deprecated: tuple[str, ...] = ()

    def shown_default(self, default: Any) -> str:
        return self.default_text or ("none" if default in (None, ()) else self.kind.shown(default))


def option(default: Any, kind: Kind, help: str, *, flag: str | None = "", **more: Any) -> Any:
    """A dataclass field with a description; `more`: further fields of Option."""
    return described(default, Option(kind, help, flag, **more))


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
    """(name, kind, the default if it needs no check) of each described field."""
    found = []
    for name, about, default in _options_of(owner):
        is_plain = default is None or about.kind.check(name, default) is default
        found.append((name, about.kind, default if is_plain else _NEVER))
    return tuple(found)


def check_options(instance: Any) -> None:
    """Check every described field of a frozen dataclass and store the plain values."""
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
    """An instance from the result of `changed`, and more fields. Raises InvalidInputError for
    unknown names."""
    known = {name for name, _, _ in options_of(owner)}
    for name in values:
        if name not in known:
            raise InvalidInputError(f"unknown field {name!r} of {owner.__name__}", field=str(name))
    return owner(**values, **more)


def rebuilt_field(owner: type[Any], name: str, values: Mapping[str, Any]) -> Any:
    """`rebuilt` for the value of a field: errors name the field, then the field inside it."""
    try:
        return rebuilt(owner, values)
    except InvalidInputError as error:
        if error.field is not None and error.field.startswith(name):
            raise
        path = name if error.field is None else f"{name}.{error.field}"
        raise InvalidInputError(
            f"{name}: {error}", field=path, value=error.value, limit=error.limit
        ) from None
