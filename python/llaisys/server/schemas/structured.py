"""Structured output fields: OpenAI's response_format, vLLM's guided_*, llama.cpp's grammar and
json_schema. All of them become one StructuredOutputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.options import Kind
from llaisys.common.structured import FIELD, StructuredOutputs
from llaisys.common.validation import check_choice, invalid_value
from llaisys.server.schemas.fields import FieldNotes, filter_object
from llaisys.server.schemas.kinds import clean

TEXT = "text"  # a response_format without a constraint
FORMAT_NAMES = frozenset({"type", "json_schema", "schema", "name", "description", "strict"})
SCHEMA_NAMES = frozenset({"name", "description", "schema", "strict"})
FORMATS = (TEXT, "json_object", "json_schema", "structural_tag")


@dataclass(frozen=True, slots=True)
class ResponseFormat(Kind):
    """OpenAI's, with llama.cpp's schema in json_object and vLLM's structural_tag."""

    def check(self, name: str, value: Any) -> StructuredOutputs | str:
        if not isinstance(value, Mapping):
            raise invalid_value(name, value, "an object with a type")
        kind = check_choice(f"{name}.type", value.get("type"), FORMATS)
        if kind == TEXT:
            return TEXT
        if kind == "structural_tag":
            return _structured(name, {"structural_tag": dict(value)})
        if kind == "json_object":
            schema = value.get("schema")
            fields = {"json_object": True} if schema is None else {"json": schema, "lenient": True}
            return _structured(f"{name}.schema", fields)
        return _json_schema(f"{name}.json_schema", value.get("json_schema"))

    def json_schema(self) -> dict[str, Any]:
        kinds = {"type": "string", "enum": list(FORMATS)}
        return {
            "type": "object",
            "properties": {"type": kinds, "json_schema": {"type": ["object", "null"]}},
            "required": ["type"],
        }


def _json_schema(name: str, given: Any) -> StructuredOutputs:
    """With `strict` every keyword of the schema must be enforceable; without it, unsupported
    keywords are ignored."""
    if not isinstance(given, Mapping):
        raise invalid_value(name, given, "an object with a schema")
    strict = given.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise invalid_value(f"{name}.strict", strict, "true or false")
    schema = given.get("schema")
    if schema is None:
        return _structured(name, {"json_object": True})
    return _structured(f"{name}.schema", {"json": schema, "lenient": not strict})


@dataclass(frozen=True, slots=True)
class Constraint(Kind):
    """A field that is one constraint."""

    constraint: str
    lenient: bool = False

    def check(self, name: str, value: Any) -> StructuredOutputs | str:
        if self.constraint == "grammar" and value == "":  # llama.cpp's default
            return TEXT
        fields = {self.constraint: value}
        return _structured(name, fields | ({"lenient": True} if self.lenient else {}))

    def json_schema(self) -> dict[str, Any]:
        kinds = {"json": ["object", "string", "boolean"], "choice": ["array"]}
        return {"type": kinds.get(self.constraint, ["string"])}


def _structured(name: str, fields: dict[str, Any]) -> StructuredOutputs:
    """Build StructuredOutputs; errors use the field name of the client."""
    try:
        return StructuredOutputs(**{key: clean(item) for key, item in fields.items()})
    except InvalidInputError as error:
        given = error.field or ""
        text = str(error).replace(given, name, 1) if given else str(error)
        raise InvalidInputError(
            text, field=name, code=error.code, value=error.value, limit=error.limit
        ) from None


def with_known_format(data: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
    """Return the body with only the known fields of its response_format; add the others to `notes`.
    A structural tag is checked as a whole."""
    given = data.get("response_format")
    if not isinstance(given, dict) or given.get("type") == "structural_tag":
        return data
    found = filter_object(given, FORMAT_NAMES, notes, "response_format")
    inner = filter_object(
        found.get("json_schema"), SCHEMA_NAMES, notes, "response_format.json_schema"
    )
    return {**data, "response_format": {**found, "json_schema": inner}}


def json_schema_format(schema: Any, name: str = "answer", strict: Any = True) -> dict[str, Any]:
    """Return the response_format of a JSON schema."""
    schema = {"name": name, "schema": schema, "strict": strict}
    return {"type": "json_schema", "json_schema": schema}


# field of a request -> its kind
STRUCTURED_FIELDS: dict[str, Kind] = {
    "response_format": ResponseFormat(),
    "guided_json": Constraint("json"),
    "guided_regex": Constraint("regex"),
    "guided_choice": Constraint("choice"),
    "guided_grammar": Constraint("grammar"),
    "grammar": Constraint("grammar"),
    "json_schema": Constraint("json", lenient=True),
}


def structured_of(body: Any) -> StructuredOutputs | None:
    """Return the constraint of a request; None if it has none. Raises InvalidInputError for two
    different ones."""
    given = {name: getattr(body, name) for name in (*STRUCTURED_FIELDS, FIELD)}
    used = {name: value for name, value in given.items() if value not in (None, TEXT)}
    names = list(used)
    for name in names[1:]:
        if used[name] != used[names[0]]:
            message = f"{name} is given; it must be left out with {names[0]}"
            raise InvalidInputError(message, field=name, limit=f"left out with {names[0]}")
    return used[names[0]] if names else None


def json_format(body: Any) -> StructuredOutputs | None:
    """Return the constraint of `response_format` if it is JSON and no other field constrains."""
    others = (getattr(body, name) for name in (*STRUCTURED_FIELDS, FIELD))
    used = [value for value in others if value not in (None, TEXT)]
    found = body.response_format
    if len(used) != 1 or not isinstance(found, StructuredOutputs):
        return None
    return found if found.constraint in ("json", "json_object") else None
