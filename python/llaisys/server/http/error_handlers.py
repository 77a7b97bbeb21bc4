"""Convert exceptions to error responses: status, message, and no internals."""

import json
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from llaisys.common.errors import InvalidInputError
from llaisys.common.lora import NOT_FOUND as LORA_NOT_FOUND
from llaisys.server.errors import (
    ApiError,
    EngineDeadError,
    EngineNotReadyError,
    QueueTimeoutError,
    SessionDiskFullError,
    SessionStorageError,
    UnknownRequestError,
    internal_error,
)
from llaisys.server.http.middleware import error_object, record_error
from llaisys.server.http.response_bodies import json_bytes
from llaisys.server.schemas.fields import field_error
from llaisys.server.schemas.kinds import WORD

logger = logging.getLogger("llaisys.server")

API_PATH = re.compile(r"/v1/[a-z0-9_/-]{1,64}")
FIELD = re.compile(r"[a-z_][a-z0-9_]*")
TYPE_NAMES = frozenset({"str", "int", "float", "bool", "list", "dict", "none", "body"})
OWN_WORDS = ("given", "true", "false", "left out", "forced")  # values in `conflicting_field`
MAX_MESSAGE = 300  # characters
MAX_VALUE = 60  # characters of a repeated value

# pydantic error type -> what the value must be, formatted with the error's context
RULES = {
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "int_type": "an integer",
    "int_parsing_size": "an integer of fewer digits",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "literal_error": "{expected}",
    "union_tag_invalid": "one of type {expected_tags}",
    "union_tag_not_found": "an object with a type",
    "string_pattern_mismatch": "a string like {pattern}",
}


# exception -> status, message, code, Retry-After
FAILURES: dict[type[Exception], tuple[int, str, str | None, int | None]] = {
    SessionDiskFullError: (507, SessionDiskFullError.message, "session_disk_full", None),
    SessionStorageError: (500, "the session file failed", "session_storage_failed", None),
    EngineDeadError: (503, "the engine has died; the server is restarting", "engine_dead", None),
    EngineNotReadyError: (503, "the model is still being loaded", "loading", 1),
    QueueTimeoutError: (503, "the request waited too long in the queue", "queue_timeout", 5),
    UnknownRequestError: (409, "this request has been read already", None, None),
}


def to_api_error(error: BaseException, request_id: str) -> ApiError:
    """Return the response to an exception; unexpected ones are a 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidInputError):
        status = 404 if error.code == LORA_NOT_FOUND else 400
        return ApiError(status, str(error)[: 4 * MAX_MESSAGE], param=error.field, code=error.code)
    for kind, (status, text, code, retry_after) in FAILURES.items():
        if isinstance(error, kind):
            if kind is SessionStorageError:
                logger.error("request %s: session file: %s", request_id, error)
            return ApiError(status, text, code=code, retry_after=retry_after)
    logger.error("request %s: %s", request_id, type(error).__name__, exc_info=error)
    return internal_error()


def validation_error(errors: Sequence[Any], known: Iterable[str] = ()) -> ApiError:
    """Return the most specific of pydantic's errors (a union reports one per member). `known`: the
    fields of the body, for suggestions."""

    def weight(error: Any) -> tuple[bool, int]:
        return not str(error["type"]).endswith("_type"), len(error["loc"])

    worst = max(errors, key=weight)
    kind = worst["type"]
    if kind == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    loc = worst["loc"]
    path = path_of(loc)
    if kind == "extra_forbidden":
        name, inside = str(loc[-1])[:100], path_of(loc[:-1])
        path = f"{inside}.{name}" if inside else name
        error = field_error(path, name, () if inside else known)
        return ApiError(400, str(error), param=path, code=error.code)
    ours = worst.get("ctx", {}).get("error")
    if isinstance(ours, InvalidInputError):
        if ours.field is None:  # its text follows the path
            text = f"{path or 'body'} {ours}"[:MAX_MESSAGE]
            return ApiError(400, text, param=path or None, code=ours.code)
        return ApiError(400, error_message(ours), param=ours.field, code=ours.code)
    return ApiError(400, f"{path or 'body'}{problem_text(worst)}"[:MAX_MESSAGE], param=path or None)


def error_message(error: InvalidInputError) -> str:
    """Return the message of an InvalidInputError, with the value as `format_value` shows it."""
    if error.limit is None or type(error.value) in (int, float) or error.value in OWN_WORDS:
        return str(error)[:MAX_MESSAGE]
    value = format_value(error.value, error.is_choice)
    return f"{error.field} is {value}; it must be {error.limit}"[:MAX_MESSAGE]


def path_of(loc: Sequence[str | int]) -> str:
    """Return `messages[0].content` from pydantic's location, without its type names."""
    path = ""
    for part in loc:
        if isinstance(part, int) or part.isdigit():  # a list index or a token id
            path += f"[{part}]"
        elif FIELD.fullmatch(part) and part not in TYPE_NAMES:
            path += f".{part}" if path else part
    return path


def problem_text(error: Any) -> str:
    """Return the rest of the message after the field name: the value and its limit."""
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        unit = "characters" if isinstance(value, str) else "items"
        most = "max_length" in context
        limit = f"at most {context['max_length']}" if most else f"at least {context['min_length']}"
        return f" has {len(value)} {unit}; it must have {limit}"
    if kind == "missing":
        return " is missing"
    if kind in RULES:
        is_choice = kind == "literal_error"
        return f" is {format_value(value, is_choice)}; it must be {RULES[kind].format(**context)}"
    return f" is {format_value(value)}; it must be another value"


def format_value(value: Any, is_choice: bool = False) -> str:
    """Return a value for a message: numbers as sent, only the type of strings, lists and objects
    (no response repeats a client's text). `is_choice`: a field with a few allowed words, where a
    word is shown."""
    if is_choice and isinstance(value, str) and WORD.fullmatch(value):
        return json.dumps(value)
    for kind, name in ((str, "a string"), (list, "a list"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    text = "null" if value is None else json.dumps(value)  # as the client wrote it
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."


def respond(request: Request, error: ApiError) -> Response:
    record_error(request.scope, error)
    body = json_bytes(error_object(request.scope, error))
    return Response(body, error.status, headers=error.headers, media_type="application/json")


def install(app: FastAPI) -> None:
    """Register handlers that return every error in the API's error format."""

    async def on_error(request: Request, error: Exception) -> Response:
        return respond(request, to_api_error(error, request.scope["state"]["request_id"]))

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return respond(request, validation_error(error.errors()))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        answer = ApiError(error.status_code, http_text(error, request.url.path, routes_of(app)))
        response = respond(request, answer)
        response.headers.update(error.headers or {})
        return response

    async def on_bug(request: Request, error: Exception) -> Response:
        return respond(request, internal_error())  # logged by `RequestContext`

    app.add_exception_handler(Exception, on_bug)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    for kind in (ApiError, InvalidInputError, *FAILURES):
        app.add_exception_handler(kind, on_error)


def http_text(error: HTTPException, path: str, routes: Sequence[str]) -> str:
    if error.status_code == 404:
        known = API_PATH.fullmatch(path)  # other paths are not repeated
        text = f"there is no route {path} on this server" if known else "there is no such route"
        near = next((route for route in routes if path.endswith(route.removeprefix("/v1"))), None)
        return f"{text}; did you mean {near}? The API's base URL ends in /v1" if near else text
    if error.status_code == 405:
        return "this route does not have this method"
    return str(error.detail)[:MAX_MESSAGE]


def routes_of(app: FastAPI) -> list[str]:
    """Return the /v1 routes for suggestions, longest first."""
    included = [getattr(route, "original_router", app) for route in app.routes]
    paths = {getattr(route, "path", "") for router in included for route in router.routes}
    return sorted((p for p in paths if p.startswith("/v1/") and "{" not in p), key=len)[::-1]
