"""The exceptions that NovaInfer raises on purpose.

User faults derive from `ValueError` and carry the field, the value and the limit, as data and in
their text; faults of the machine or of the engine derive from `RuntimeError`.
"""

from __future__ import annotations

from typing import Any


class LlaisysError(Exception):
    """Base of every exception raised on purpose by this package."""


class InvalidInputError(LlaisysError, ValueError):
    """An argument, a request or a configuration that can never be served.

    `field` is the path of what is wrong ("stop[2]", "messages[0].content"), `value` what was given
    and `limit` what follows "it must be"; `code` tells programs which fault it is. The text is for
    people: nobody looks for words in it. `is_choice`: the value is one of a few words, or should
    have been. `llaisys.common.validation.invalid_value` makes most of them.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        value: Any = None,
        limit: str | None = None,
        is_choice: bool = False,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.code = code
        self.value = value
        self.limit = limit
        self.is_choice = is_choice

    def with_prefix(self, prefix: str) -> InvalidInputError:
        """Return a copy with `prefix` before the text."""
        return InvalidInputError(
            f"{prefix}{self}",
            field=self.field,
            code=self.code,
            value=self.value,
            limit=self.limit,
            is_choice=self.is_choice,
        )


# Codes that more than one layer names.
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class ModelLoadError(LlaisysError, ValueError):
    """A model directory or file that is missing, damaged or of an unknown kind."""


class NativeError(LlaisysError, RuntimeError):
    """The native library failed; `code` is its return code."""

    def __init__(self, message: str, code: int = -3) -> None:
        super().__init__(message)
        self.code = code


class ClosedError(LlaisysError, RuntimeError):
    """A handle was used after `close()`."""


class KvCacheFullError(LlaisysError, RuntimeError):
    """The KV cache has no free slot for this step; nothing was changed."""
