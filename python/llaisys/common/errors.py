"""The exceptions that NovaInfer raises on purpose.

User faults derive from `ValueError` and carry the field, the value and the limit in their text;
faults of the machine or of the engine derive from `RuntimeError`.
"""


class LlaisysError(Exception):
    """Base of every exception raised on purpose by this package."""


class InvalidInputError(LlaisysError, ValueError):
    """An argument, a request or a configuration that can never be served."""


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
