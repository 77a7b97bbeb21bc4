"""What every object of a body is made of."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue

from llaisys.common.errors import InvalidInputError
from llaisys.server.openai.dropped_tools import drop_tools
from llaisys.server.openai.field_help import help_of_field
from llaisys.server.openai.fields import FieldNotes, Reasons, sift
from llaisys.tokenization.unicode_text import clean_text

MAX_FIELDS = 128


def refuse_together(field: str, given: object, limit: str) -> InvalidInputError:
    """The error for a value that another field of the request rules out."""
    message = f"{field} is {given}; it must be {limit}"
    return InvalidInputError(message, field=field, value=given, limit=limit)


class Schema(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    path: ClassVar[str] = ""  # of the object in a body, before its fields' names
    refused: ClassVar[Reasons | None] = None  # fields of this protocol that are not supported
    own_aliases: ClassVar[bool] = False  # see `fields.sift`
    tool_types: ClassVar[frozenset[str] | None] = None  # of `tools`; others are dropped

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """With descriptions of the fields."""
        schema = handler(core_schema)
        for name, field in handler.resolve_ref_schema(schema).get("properties", {}).items():
            text = help_of_field(cls.__name__, name)
            if text is not None:
                field["description"] = text
        return schema

    @model_validator(mode="before")
    @classmethod
    def sift(cls, data: Any, info: ValidationInfo) -> Any:
        """Leave out what is not used, so that only its use is an error."""
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:  # each unknown one would be reported
            limit = f"at most {MAX_FIELDS}"
            raise InvalidInputError(  # faults.py puts the path before it
                f"has {len(data)} fields; it must have {limit}", value=len(data), limit=limit
            )
        return cls.prepare(data, info.context or FieldNotes())

    @classmethod
    def prepare(cls, data: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        """The fields to validate."""
        if cls.tool_types is not None:
            data = drop_tools(data, cls.tool_types, notes)
        return sift(
            data,
            names_of(cls),
            notes,
            cls.path,
            refused=cls.refused,
            own_aliases=cls.own_aliases,
        )


@cache
def names_of(schema: type[Schema]) -> frozenset[str]:
    """The names of a schema's fields in a body."""
    return frozenset(about.alias or name for name, about in schema.model_fields.items())


# JSON can spell halves of characters that no other layer could encode; they become U+FFFD.
Text = Annotated[str, AfterValidator(clean_text)]
# The name of a model. An empty one names none, as when it is left out.
ModelName = Annotated[
    Text | None, Field(max_length=1024), AfterValidator(lambda name: name or None)
]
