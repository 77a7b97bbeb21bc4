"""The base class of all request schemas."""

from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from llaisys.common.errors import InvalidInputError
from llaisys.common.validation import MAX_INT
from llaisys.server.schemas.field_help import help_of_field
from llaisys.server.schemas.fields import FieldNotes, Reasons, drop_tools, filter_fields
from llaisys.tokenization.unicode_text import clean_text

MAX_FIELDS = 128


def conflicting_field(field: str, given: object, limit: str) -> InvalidInputError:
    """Return the error for a value that conflicts with another field."""
    message = f"{field} is {given}; it must be {limit}"
    return InvalidInputError(message, field=field, value=given, limit=limit)


def set_fail_fast(schema: Any) -> None:
    """Make every list end at its first invalid item: a report of each of 100,000 costs seconds."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            set_fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            set_fail_fast(part)


class Schema(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    path: ClassVar[str] = ""  # prefix of field names in messages; a class argument
    rejected: ClassVar[Reasons | None] = None  # fields of this protocol that are not supported
    own_aliases: ClassVar[bool] = False  # see `fields.filter_fields`
    tool_types: ClassVar[frozenset[str] | None] = None  # of `tools`; others are dropped

    def __init_subclass__(cls, path: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if path:
            cls.path = path

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        set_fail_fast(handler.resolve_ref_schema(schema))
        return schema

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
    def filter_fields(cls, data: Any, info: ValidationInfo) -> Any:
        """Remove ignored fields before validation, so that only used ones can be errors."""
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:  # pydantic would report each unknown one
            limit = f"at most {MAX_FIELDS}"
            raise InvalidInputError(  # error_handlers.py prefixes the path
                f"has {len(data)} fields; it must have {limit}", value=len(data), limit=limit
            )
        return cls.prepare(data, info.context or FieldNotes())

    @classmethod
    def prepare(cls, data: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        """Return the fields to validate."""
        if cls.tool_types is not None:
            data = drop_tools(data, cls.tool_types, notes)
        return filter_fields(
            data,
            names_of(cls),
            notes,
            cls.path,
            rejected=cls.rejected,
            own_aliases=cls.own_aliases,
        )


@cache
def names_of(schema: type[Schema]) -> frozenset[str]:
    """Return the field names of a schema in a body."""
    return frozenset(about.alias or name for name, about in schema.model_fields.items())


# JSON strings may contain lone surrogates, which cannot be encoded; they become U+FFFD.
Text = Annotated[str, AfterValidator(clean_text)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
# A model name; empty means not given.
ModelName = Annotated[
    Text | None, Field(max_length=1024), AfterValidator(lambda name: name or None)
]
