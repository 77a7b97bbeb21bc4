"""Expected errors by the data that programs read; the sentences have tests of their own."""

from __future__ import annotations

import pytest

from llaisys.common.errors import InvalidInputError


def invalid_input(field: str) -> pytest.RaisesExc[InvalidInputError]:
    """Expect an `InvalidInputError` of that field."""
    return pytest.raises(InvalidInputError, check=lambda error: error.field == field)
