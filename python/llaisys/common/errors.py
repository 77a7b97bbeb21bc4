"""Exceptions of NovaInfer.

Errors of the user derive from `ValueError` and have the field, the value and the limit, as data and
in the text; errors of the machine or the engine derive from `RuntimeError`.
"""

from __future__ import annotations

from typing import Any


class LlaisysError(Exception):
    """Base class of the exceptions of this package."""


class InvalidInputError(LlaisysError, ValueError):
    """An argument, a request or a configuration that can never be served.

    `field` is a path ("stop[2]", "messages[0].content"), `value` the given value and `limit` the
    text after "it must be"; `code` identifies the error for programs. `is_choice`: the valid values
    are a few words. `llaisys.common.validation.invalid_value` creates most of them.
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
        return InvalidInputError(f"{prefix}{self}", **vars(self))


# Codes used by several layers.
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class ModelLoadError(LlaisysError, ValueError):
    """A model directory or file is missing, damaged or of an unknown type. `available`: the names
    that could be given instead, if there are a few."""

    def __init__(self, message: str, *, available: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.available = available


class NativeError(LlaisysError, RuntimeError):
    """The native library failed; `code` is its return code."""

    def __init__(self, message: str, code: int = -3) -> None:
        super().__init__(message)
        self.code = code


class ClosedError(LlaisysError, RuntimeError):
    """A handle was used after `close()`."""


class KvCacheFullError(LlaisysError, RuntimeError):
    """The KV cache has no free slot for this step; nothing was changed."""
