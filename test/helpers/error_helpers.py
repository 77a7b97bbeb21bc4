"""Expected errors by the data that programs read; the sentences have tests of their own."""

from __future__ import annotations

from typing import TypeVar

import pytest

from llaisys.common.errors import InvalidInputError

E = TypeVar("E", bound=BaseException)


def invalid_input(field: str) -> pytest.RaisesExc[InvalidInputError]:
    """Expect an `InvalidInputError` of that field."""
    return pytest.raises(InvalidInputError, check=lambda error: error.field == field)


def naming(error: type[E], *names: str) -> pytest.RaisesExc[E]:
    """Expect an error whose text names these arguments, values or files, in whatever words."""
    return pytest.raises(error, check=lambda found: all(name in str(found) for name in names))
