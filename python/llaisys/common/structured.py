"""Constraints of structured output: a JSON schema, a regex, a choice, or a grammar.

    SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object", ...}))
    SamplingParams(structured_outputs={"choice": ["yes", "no"]})       the same as plain data

The names are those of vLLM. Only sizes, nesting and the number of constraints are checked here;
`llaisys.engine.structured` compiles the constraint in another process.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.options import (
    Kind,
    Record,
    Strings,
    Switch,
    changed,
    check_options,
    option,
    rebuilt_field,
)
from llaisys.common.validation import check_count, check_text, invalid_count, invalid_value

FIELD = "structured_outputs"
MAX_SCHEMA_CHARS = 128 << 10  # of a schema as JSON text; OpenAI's limit is 120,000
MAX_SCHEMA_DEPTH = 64  # nested objects and lists
MAX_GRAMMAR_CHARS = 64 << 10
MAX_REGEX_CHARS = 16 << 10
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 4096
MAX_CHOICES_CHARS = 64 << 10  # of all of them


@dataclass(frozen=True, slots=True)
class JsonText(Kind):
    """An object (or a boolean, for JSON Schema) or its JSON text; stored as text."""

    may_be_bool: bool = False

    def check(self, name: str, value: Any) -> str:
        data = _read(name, value) if isinstance(value, str) else value
        if not isinstance(data, Mapping) and not (self.may_be_bool and isinstance(data, bool)):
            raise invalid_value(name, data, "an object")
        depth = _depth(data)
        if depth > MAX_SCHEMA_DEPTH:
            raise invalid_count(name, depth, "levels", f"at most {MAX_SCHEMA_DEPTH}")
        try:
            text = json.dumps(data, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            message = f"{name} is not JSON: {str(error)[:200]}"
            raise InvalidInputError(message, field=name) from None
        check_count(name, len(text), MAX_SCHEMA_CHARS, "characters")
        return text

    def json_schema(self) -> dict[str, Any]:
        kinds = ["object", "string", *(["boolean"] if self.may_be_bool else [])]
        return {"type": kinds, "maxLength": MAX_SCHEMA_CHARS}


@dataclass(frozen=True, slots=True)
class LongText(Kind):
    """A non-empty string of bounded length."""

    max_chars: int

    def check(self, name: str, value: Any) -> str:
        text = check_text(name, value)
        check_count(name, len(text), self.max_chars, "characters")
        _check_unicode(name, text)
        return text

    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1, "maxLength": self.max_chars}


@dataclass(frozen=True, slots=True)
class ChoiceTexts(Strings):
    """Several texts of bounded total length."""

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        texts = super(ChoiceTexts, self).check(name, value)
        if not texts:
            raise invalid_count(name, 0, "strings", "at least 1")
        check_count(name, sum(map(len, texts)), MAX_CHOICES_CHARS, "characters")
        _check_unicode(name, "".join(texts))
        return texts


_SCHEMA = JsonText(may_be_bool=True)
_CHOICES = ChoiceTexts(MAX_CHOICES, MAX_CHOICE_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of the first six fields is set. `json` and `structural_tag` are stored as JSON
    text, so that instances can be compared and hashed."""

    json: str | Mapping[str, Any] | bool | None = option(
        None, _SCHEMA, "a JSON schema that the answer fulfils"
    )
    json_object: bool = option(False, Switch(), "the answer is a JSON object")
    regex: str | None = option(
        None, LongText(MAX_REGEX_CHARS), "a regular expression that the whole answer matches"
    )
    choice: tuple[str, ...] | list[str] | None = option(
        None, _CHOICES, "the answer is one of these"
    )
    grammar: str | None = option(
        None, LongText(MAX_GRAMMAR_CHARS), "a grammar of the answer: llama.cpp's GBNF or Lark"
    )
    structural_tag: str | Mapping[str, Any] | None = option(
        None, JsonText(), "free text with tags whose contents have schemas"
    )
    lenient: bool = option(
        False, Switch(), "pass over keywords of a schema that cannot be enforced, not refuse them"
    )
    whitespace_pattern: str | None = option(
        None, LongText(256), "what may stand between the parts of a JSON text"
    )
    disable_any_whitespace: bool = option(False, Switch(), "nothing stands between them")
    disable_additional_properties: bool | None = option(
        None, Switch(), "objects of the schema have no other properties than those it names",
        default_text="where it names some",
        more="`additionalProperties` of a schema comes first.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidInputError(
                f"{FIELD} has {' and '.join(given) or 'none'} of {', '.join(CONSTRAINTS)}; it must "
                "have exactly one",
                field=f"{FIELD}.{given[1]}" if given else FIELD,
                value=given,
                limit="exactly one",
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise invalid_value(f"{FIELD}.whitespace_pattern", self.whitespace_pattern, "left out")

    @property
    def constraint(self) -> str:
        """The name of the constraint that is set."""
        return next(name for name in CONSTRAINTS if getattr(self, name) not in (None, False))

    def to_wire(self) -> dict[str, Any]:
        """Return the fields that are set, as plain data for `StructuredOutputs(**values)`."""
        return changed(self)


CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True)
class Structured(Record):
    """The kind of `SamplingParams.structured_outputs`: the record, or a mapping of its fields."""

    owner: type[Any] = StructuredOutputs

    def limits(self) -> str:
        return f"object with one of {', '.join(f'`{name}`' for name in CONSTRAINTS)}"

    def check(self, name: str, value: Any) -> StructuredOutputs:
        if isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            raise invalid_value(name, value, "an object with one of " + ", ".join(CONSTRAINTS))
        given = {str(key): item for key, item in value.items() if item is not None}
        given.pop("disable_fallback", None)  # vLLM's: there is one backend here
        return rebuilt_field(StructuredOutputs, name, given)


def _read(name: str, text: str) -> Any:
    check_count(name, len(text), MAX_SCHEMA_CHARS, "characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"{name} is text that is not JSON; it must be JSON: {str(error)[:200]}"
        raise InvalidInputError(message, field=name, limit="JSON") from None


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{name} has halves of characters (surrogates); it must be whole characters"
        raise InvalidInputError(message, field=name, limit="whole characters") from None


def _depth(data: Any) -> int:
    """Return the nesting depth, at most MAX_SCHEMA_DEPTH + 1."""
    depth, level = 0, [data]
    while level and depth <= MAX_SCHEMA_DEPTH:
        level = [
            item
            for parent in level
            if isinstance(parent, (Mapping, list, tuple))
            for item in (parent.values() if isinstance(parent, Mapping) else parent)
        ]
        depth += 1
    return depth
