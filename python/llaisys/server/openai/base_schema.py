"""What every object of a body is made of."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from llaisys.common.errors import InvalidInputError
from llaisys.server.openai.fields import FieldNotes, sift
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
    takes_any: ClassVar[bool] = False  # names that nobody knows are hints here

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
        return sift(data, cls.model_fields, notes, cls.path, cls.takes_any)


# JSON can spell halves of characters that no other layer could encode; they become U+FFFD.
Text = Annotated[str, AfterValidator(clean_text)]
# The name of a model. An empty one names none, as when it is left out.
ModelName = Annotated[
    Text | None, Field(max_length=1024), AfterValidator(lambda name: name or None)
]
