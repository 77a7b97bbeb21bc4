"""Chat templates: Jinja source from a model, rendered in a metered sandbox.

The output equals that of transformers' `apply_chat_template` for every template within the filters
and limits of `sandbox`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.meta import find_undeclared_variables

from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.tokenization.render_limits import (
    LimitExceeded,
    Meter,
    OutOfBudget,
    RenderLimits,
    current_meter,
)
from llaisys.tokenization.sandbox import MeteredEnvironment

MAX_TEMPLATE_CHARS = 64 * 1024
_MAX_INPUT_DEPTH = 64


class _Raised(TemplateError):
    """The template called raise_exception."""


class TemplateNamespace(jinja2.utils.Namespace):
    """`namespace()` without underscore names and without its values in repr."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot have {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _namespace(*args: Any, **kwargs: Any) -> TemplateNamespace:
    values = dict(*args, **kwargs)
    for name in values:
        if not isinstance(name, str) or name.startswith("_"):
            raise SecurityError(f"a namespace cannot have {name!r}")
    return TemplateNamespace(values)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise _Raised(str(message)[:1000])


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's filter, does not escape HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> MeteredEnvironment:
    environment = MeteredEnvironment()
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = _namespace
    environment.globals["dict"] = _make_dict
    return environment


class ChatTemplate:
    """A compiled template. Immutable and thread-safe.

    Raises `ModelLoadError` when the source is too long or not a template.
    """

    def __init__(self, source: str, limits: RenderLimits | None = None) -> None:
        self.source = source
        self._limits = limits or RenderLimits()
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelLoadError(
                f"chat template: {len(source)} characters, more than {MAX_TEMPLATE_CHARS}"
            )
        try:
            environment = _environment()
            tree = environment.parse(source)
            self.literal_text = _literal_text(tree)
            self.variables = frozenset(find_undeclared_variables(tree))
            self._template = environment.from_string(tree)
        except (TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ModelLoadError(f"chat template: {_describe(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> str:
        """The prompt text. `variables`: further template variables (bos_token, ...); `now`: time of
        strftime_now. Raises `InvalidInputError` when the template rejects the messages, fails, or
        exceeds its limits."""
        moment = now or datetime.now()
        values = {
            **{str(key): plain_data(value) for key, value in (variables or {}).items()},
            "messages": plain_data(list(messages)),
            "tools": plain_data(list(tools)) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": lambda text: moment.strftime(_short(text)),
        }
        token = current_meter.set(Meter(self._limits, count_chars(values)))
        try:
            return self._template.render(values)
        except OutOfBudget:
            raise
        except LimitExceeded as error:
            raise _invalid(f"stopped: {error}") from error
        except _Raised as error:
            raise _invalid(error.message) from error
        except Exception as error:
            raise _invalid(_describe(error)) from error
        finally:
            current_meter.reset(token)


def _short(text: object) -> str:
    if not isinstance(text, str) or len(text) > 200:
        raise SecurityError("strftime_now takes a format of at most 200 characters")
    return text


def _literal_text(tree: nodes.Template) -> str:
    """All literal texts of a template, separated by NUL."""
    pieces = [node.data for node in tree.find_all(nodes.TemplateData)]
    pieces += [n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)]
    return "\0".join(pieces)


def _invalid(why: object) -> InvalidInputError:
    return InvalidInputError(f"chat template: {why}", field="messages")


def _describe(error: BaseException) -> str:
    text = str(error).splitlines()[0][:300] if str(error) else ""
    line = getattr(error, "lineno", None)
    location = f" (line {line})" if isinstance(line, int) else ""
    return f"{type(error).__name__}: {text}{location}"


def plain_data(value: Any, depth: int = 0) -> Any:
    """`value` rebuilt from exact JSON types, so that templates cannot call other methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > _MAX_INPUT_DEPTH:
        raise InvalidInputError(
            f"messages: nested more than {_MAX_INPUT_DEPTH} deep", field="messages"
        )
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, depth + 1) for item in value]
    raise InvalidInputError(
        f"messages: a value of type {type(value).__name__} is not JSON", field="messages"
    )


def count_chars(value: Any) -> int:
    """Characters of all strings in `value`, plus a constant per element."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(16 + len(str(key)) + count_chars(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(16 + count_chars(item) for item in value)
    return 0
