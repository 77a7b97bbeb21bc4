"""Whatever is wrong with a body, its refusal has one grammar: FIELD is VALUE; it must be LIMIT."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import ValidationError

import llaisys.server.app  # noqa: F401  # imports every schema
from llaisys.server.http.error_handlers import validation_error
from llaisys.server.schemas.base import MAX_FIELDS, Schema

VALUES = [True, -1, 1.5, 10**400, "x", [], {}, [1], [{"type": "x"}], {"type": "x", "role": 1}]
GRAMMAR = re.compile(
    r"""[\w.\[\]]+\ is\ .+;\ it\ must\ be\ .+ | [\w.\[\]]+\ has\ .+;\ it\ must\ have\ .+ |
    [\w.\[\]]+\ is\ missing | (\w+:\ )?unknown\ field\ .+""",
    re.VERBOSE | re.DOTALL,
)


def schemas(base: type[Schema]) -> Iterator[type[Schema]]:
    for schema in base.__subclasses__():
        yield schema
        yield from schemas(schema)


def test_every_field_error_has_the_same_grammar() -> None:
    found = sorted(set(schemas(Schema)), key=lambda schema: schema.__qualname__)
    too_many = {f"field_{number}": 1 for number in range(MAX_FIELDS + 1)}
    refused = 0
    for schema in found:
        bodies = [{name: value} for name in schema.model_fields for value in VALUES]
        for body in [*VALUES, too_many, *bodies]:
            try:
                schema.model_validate(body)
            except ValidationError as error:
                refused += 1
                message = validation_error(error.errors(), schema.model_fields).message
                assert GRAMMAR.fullmatch(message), (schema, body, message)
            except NotImplementedError:
                continue  # the base of others
    assert refused > 50 * len(found)
