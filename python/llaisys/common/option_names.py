"""The names under which options are accepted: their own, aliases, and deprecated ones.

The same names work as keywords of `LLM`, as keys of a configuration file and, with dashes, as
flags. A deprecated name works until REMOVAL and gives a warning.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.options import Option, Switch, Toggle
from llaisys.common.validation import check_bool

REMOVAL = "0.2.0"  # the release after which no present deprecated name works

Row = tuple[str, Option, Any]  # (name of the field, description, default)


@dataclass(frozen=True, slots=True)
class Spelling:
    """An accepted name of an option."""

    name: str  # of the field
    is_deprecated: bool = False
    is_negated: bool = False  # no_NAME of a switch


def flag_of(name: str, about: Option) -> str:
    return about.flag or "--" + name.replace("_", "-")


def spellings(rows: Iterable[Row]) -> dict[str, Spelling]:
    """Every accepted name, in snake case."""
    rows = list(rows)
    found = {name: Spelling(name) for name, _, _ in rows}
    for name, about, _ in rows:
        own = [flag_of(name, about).removeprefix("--").replace("-", "_")]
        for is_deprecated, others in ((False, [*own, *about.aliases]), (True, about.deprecated)):
            for other in others:
                if not other.startswith("-"):
                    found.setdefault(other, Spelling(name, is_deprecated))
    for other, spelling in list(found.items()):
        about = next(about for name, about, _ in rows if name == spelling.name)
        if isinstance(about.kind, (Switch, Toggle)):
            negated = Spelling(spelling.name, spelling.is_deprecated, is_negated=True)
            found.setdefault(f"no_{other}", negated)
    return found


def deprecation(old: str, new: str) -> str:
    return f"{old} is deprecated and will be removed in {REMOVAL}; use {new}"


def warn_of_keyword(old: str, new: str) -> None:
    warnings.warn(deprecation(old, new), FutureWarning, stacklevel=4)


def warn_of_file(old: str, new: str) -> None:
    print(f"warning: {deprecation(old, new)}", file=sys.stderr)


def with_field_names(
    values: Mapping[str, Any],
    rows: Iterable[Row],
    warn: Callable[[str, str], None] = warn_of_keyword,
) -> dict[str, Any]:
    """`values` with the options in `rows` under their fields' names; other names stay as they are.
    Raises InvalidInputError for an option that is given under two names."""
    known = spellings(rows)
    found: dict[str, Any] = {}
    given: dict[str, str] = {}  # field -> the name it was given under
    for key, value in values.items():
        spelling = known.get(key)
        name = key if spelling is None else spelling.name
        if name in found:
            raise InvalidInputError(f"{given[name]} and {key} are the same option", field=key)
        if spelling is not None and spelling.is_deprecated:
            warn(key, name)
        if spelling is not None and spelling.is_negated:
            value = not check_bool(key, value)
        found[name], given[name] = value, key
    return found
