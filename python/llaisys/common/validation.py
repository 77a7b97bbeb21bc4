"""Validation of user input, with one grammar of error texts:

    FIELD is VALUE; it must be LIMIT            n is 129; it must be an integer from 1 to 128
    FIELD has COUNT UNIT; it must have LIMIT    stop has 65 strings; it must have at most 64

A check returns the normalized value (an `int` for a numpy integer, a tuple for a list) or raises
InvalidInputError, which has the same values as fields.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from operator import index
from struct import error
from typing import Any
from urllib.parse import urlsplit

from llaisys.common.errors import InvalidInputError

MAX_INT = (1 << 31) - 1
MIN_FLOAT = 2.0**-126  # the smallest normal number in single precision
MAX_SHOWN = 80  # characters of a value in an error
MIN_LIKENESS = 0.75  # of a suggested name, from 0 to 1
MANY_IDS = 64  # from here on an array check is faster
MAX_SHOWN_BITS = 256  # of an integer; Python does not print very large ones


def format_value(value: object) -> str:
    """Format a value for an error text, truncated."""
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (list, tuple, dict, set, frozenset)) and len(value) > MAX_SHOWN:
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def invalid_value(
    field: str, value: object, limit: str, *, label: str | None = None, **more: Any
) -> InvalidInputError:
    """Return the error of an invalid value; `limit` follows "it must be". `label`: name in the
    text, if not the field; `more`: further fields of the error."""
    message = f"{label or field} is {format_value(value)}; it must be {limit}"
    return InvalidInputError(message, field=field, value=value, limit=limit, **more)


def invalid_count(
    field: str, count: int, unit: str, limit: str, *, code: str | None = None
) -> InvalidInputError:
    """Return the error of an invalid count; `limit` follows "it must have"."""
    message = f"{field} has {count} {unit}; it must have {limit}"
    return InvalidInputError(message, field=field, code=code, value=count, limit=limit)


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return "unknown WHAT NAME", with the nearest known name if there is one."""
    words = {other.lstrip("-"): other for other in known}  # equal dashes are no likeness
    near = get_close_matches(name.lstrip("-"), words, n=1, cutoff=MIN_LIKENESS)
    return f"unknown {what} {name!r}" + (f"; did you mean {words[near[0]]!r}?" if near else "")


def check_int(
    name: str, value: Any, low: int, high: int = MAX_INT, *, label: str | None = None
) -> int:
    """Accept integers of any type, but no bool and no float."""
    if type(value) is not int:
        try:
            if isinstance(value, bool):
                raise TypeError
            value = index(value)
        except TypeError:
            raise invalid_value(name, value, integer_limit(low, high), label=label) from None
    if not low <= value <= high:
        raise invalid_value(name, value, integer_limit(low, high), label=label)
    return int(value)


def is_int(value: object, low: int, high: int) -> bool:
    """Whether a JSON value is an integer in [low, high]."""
    return type(value) is int and low <= value <= high


def integer_limit(low: int, high: int) -> str:
    return f"an integer from {low} to {high}"


def check_float(
    name: str, value: object, low: float, high: float = math.inf, *, above_low: bool = False
) -> float:
    """Accept a finite number from `low` (above it, if `above_low`) to `high`."""
    number = math.nan
    if type(value) is float or (not isinstance(value, bool) and isinstance(value, Real)):
        try:
            number = float(value)
        except OverflowError:  # an integer beyond the range of float
            number = math.nan
    if not math.isfinite(number) or not low <= number <= high or (above_low and number == low):
        raise invalid_value(name, value, number_limit(low, high, above_low))
    if above_low and number - low < MIN_FLOAT:  # would be the lower limit in single precision
        raise invalid_value(name, value, number_limit(low + MIN_FLOAT, high))
    return number


def number_limit(low: float, high: float, above_low: bool = False) -> str:
    if not math.isfinite(high):
        return f"a finite number {'above' if above_low else 'of at least'} {low:g}"
    return f"a finite number {'above' if above_low else 'from'} {low:g} to {high:g}"


def check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise invalid_value(name, value, "true or false")
    return value


def check_string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise invalid_value(name, value, "a string")
    return value


def check_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise invalid_value(name, value, "a string that is not empty")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise invalid_value(name, value, f"one of {', '.join(choices)}", is_choice=True)
    return value


def check_url(name: str, url: str, *, label: str | None = None) -> tuple[bool, str, int, str]:
    """Return (TLS?, host, port, path) of an http or https URL."""
    wanted = invalid_value(name, url, "http(s)://HOST[:PORT]", label=label)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wanted from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise wanted
    is_tls = parts.scheme == "https"
    return is_tls, parts.hostname, port or (443 if is_tls else 80), parts.path


def check_count(name: str, count: int, most: int, unit: str) -> None:
    if count > most:
        raise invalid_count(name, count, unit, f"at most {most}")


def check_strings(name: str, value: Any, max_count: int, max_chars: int) -> tuple[str, ...]:
    """Accept None (no strings), a string, or a collection of strings."""
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, (list, tuple, set, frozenset)):
        raise invalid_value(name, value, "a string or a list of strings")
    check_count(name, len(items), max_count, "strings")
    for i, item in enumerate(items):
        check_string(f"{name}[{i}]", item)
        if not item:
            raise invalid_count(f"{name}[{i}]", 0, "characters", "at least 1")
        check_count(f"{name}[{i}]", len(item), max_chars, "characters")
    return tuple(dict.fromkeys(items))


def check_token_ids(
    name: str, value: Any, max_count: int, high: int = MAX_INT, *, min_count: int = 0
) -> tuple[int, ...]:
    """Accept ids from 0 to `high`; order and duplicates are preserved."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise invalid_value(name, value, "a list of token ids")
    items = tuple(value)
    check_count(name, len(items), max_count, "ids")
    if len(items) < min_count:
        raise invalid_count(name, len(items), "ids", f"at least {min_count}")
    if len(items) >= MANY_IDS and _are_plain_ids(items, high):
        return items
    return tuple(check_int(f"{name}[{i}]", item, 0, high) for i, item in enumerate(items))


def check_prompt_ids(name: str, value: Any, high: int) -> list[int]:
    """Check the ids of a prompt, which may be long; return a copy."""
    if type(value) is list and len(value) >= MANY_IDS and _are_plain_ids(value, high):
        return list(value)
    return list(check_token_ids(name, value, MAX_INT, high))


def _are_plain_ids(items: Sequence[Any], high: int) -> bool:
    """Whether all are integers from 0 to `high`, and no bool."""
    from llaisys.common.packed import packed_ints  # imports numpy, which short commands avoid

    try:
        if type(sum(items)) is not int:  # a numpy integer
            return False
        values = packed_ints(items)
    except (error, TypeError):
        return False
    lowest = values.min()
    if lowest < 0 or values.max() > high:
        return False
    suspects = (values <= 1).nonzero()[0].tolist() if lowest <= 1 else ()
    return not any(isinstance(items[i], bool) for i in suspects)
