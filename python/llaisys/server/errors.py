"""Errors of the HTTP API, in OpenAI's format."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from llaisys.common.errors import InvalidInputError, LlaisysError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(LlaisysError):
    """An error response. `message` is sent to the client: no paths, no internals."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        details: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after  # seconds, into the Retry-After header
        self.details = details or {}  # numbers for programs, into the error object

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def body(self, request_id: str | None) -> dict[str, Any]:
        body = error_body(self.status, self.message, self.param, self.code, request_id)
        body["error"].update(self.details)
        return body


# The error format of an API: (error, request id) -> response body.
ErrorShape = Callable[[ApiError, str | None], dict[str, Any]]


def error_type(status: int) -> str:
    return TYPES.get(status, "server_error" if status >= 500 else TYPES[400])


def internal_error() -> ApiError:
    """Return a 500 without details; the log has them under the request id."""
    return ApiError(500, "internal error", code="internal_error")


def is_fault(error: BaseException) -> bool:
    """Whether an exception is an error rather than a request to stop. A panic in a Rust library is
    not an `Exception`, but counts as an error."""
    stops = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
    return not isinstance(error, stops)


def error_body(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    request_id: str | None = None,
) -> dict[str, Any]:
    return {
        "error": {
            "message": message,
            "type": error_type(status),
            "param": param,
            "code": code,
            "request_id": request_id,
        }
    }


class EngineDeadError(LlaisysError, RuntimeError):
    """The engine process ended or stopped responding."""


class EngineNotReadyError(LlaisysError, RuntimeError):
    """The engine is still loading its model."""


class RejectedError(InvalidInputError):
    """The engine rejected a request that it can never run."""


class QueueTimeoutError(LlaisysError, RuntimeError):
    """A request waited longer than the queue timeout."""


class UnknownRequestError(LlaisysError, LookupError):
    """There is no such request, or its output has already been read."""


class SessionLimitError(ApiError):
    """A limit of the stored sessions is reached."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(400, message, param="session_id", code=code)


class SessionStorageError(LlaisysError, RuntimeError):
    """The session file could not be read or written; nothing was changed."""


class SessionDiskFullError(SessionStorageError):
    """The disk of the session file is full; nothing was changed."""

    message = "the disk of the session file is full"

    def __init__(self) -> None:
        super().__init__(self.message)
