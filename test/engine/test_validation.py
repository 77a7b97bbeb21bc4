"""Errors have field, value and limit as data, and one grammar."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llaisys
from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.common.validation import (
    check_choice,
    check_float,
    check_int,
    check_prompt_ids,
    check_strings,
    check_token_ids,
    invalid_count,
    invalid_value,
)


def fault(check: Any, *arguments: Any, **options: Any) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as caught:
        check(*arguments, **options)
    return caught.value


def test_error_has_field_value_and_limit_as_data_and_text():
    error = invalid_value("n", 129, "an integer from 1 to 128", code="too_many")
    assert str(error) == "n is 129; it must be an integer from 1 to 128"
    assert (error.field, error.value, error.limit, error.code) == (
        "n",
        129,
        "an integer from 1 to 128",
        "too_many",
    )
    count = invalid_count("stop", 65, "strings", "at most 64")
    assert str(count) == "stop has 65 strings; it must have at most 64"
    assert (count.field, count.value, count.limit) == ("stop", 65, "at most 64")
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        ({"temperature": 101}, "temperature", 101),
        ({"stop": ["a", 5]}, "stop[1]", 5),
        ({"stop": ["a", ""]}, "stop[1]", 0),
        ({"stop_token_ids": [1, -2]}, "stop_token_ids[1]", -2),
        ({"logit_bias": {7: 200.0}}, "logit_bias[7]", 200.0),
        ({"logit_bias": {-7: 1.0}}, "logit_bias", -7),
        ({"samplers": ["top_k", "hot"]}, "samplers[1]", "hot"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", 3),
    ],
    ids=str,
)
def test_the_field_is_a_path_to_what_is_wrong(params, field, value):
    error = fault(SamplingParams, **params)
    assert (error.field, error.value) == (field, value)
    assert error.limit and error.limit in str(error)


def test_integers_of_any_type_are_accepted():
    assert check_int("x", np.int64(5), 0, 9) == 5 and type(check_int("x", np.int64(5), 0)) is int
    for value in (True, 1.0, "1", None, np.float32(1), np.bool_(True), [1]):
        assert fault(check_int, "x", value, 0, 9).value is value
    assert "an integer of 40000 bits" in str(fault(check_int, "x", 1 << 39999, 0, 9))


def test_numbers_must_be_finite_and_within_their_range():
    assert check_float("x", 1, 0) == 1.0 and check_float("x", np.float32(0.5), 0, 1) == 0.5
    for value in (math.nan, math.inf, -math.inf, 10**400, True, "1", None, 1j, 2):
        fault(check_float, "x", value, 0, 1)
    assert "above 0 to 1" in str(fault(check_float, "x", 0.0, 0, 1, above_low=True))
    assert (
        str(fault(check_float, "x", -1, 0)) == "x is -1; it must be a finite number of at least 0"
    )


def test_lists_are_checked_item_by_item():
    assert check_strings("s", "ab", 1, 2) == ("ab",) and check_strings("s", None, 1, 2) == ()
    assert fault(check_strings, "s", ["a", 5], 4, 4).field == "s[1]"
    assert check_token_ids("t", np.array([3, 3]), 4) == (3, 3)
    assert fault(check_token_ids, "t", [1, 9], 4, 8).field == "t[1]"
    assert fault(check_choice, "c", ["a"], ("a", "b")).limit == "one of a, b"


def test_long_prompts_are_checked_as_short_ones_are():
    ids = [n % 10 for n in range(200)]
    for given in (ids, tuple(ids), np.array(ids), [np.int32(n) for n in ids], iter(ids)):
        plain = check_prompt_ids("p", given, 9)
        assert plain == ids and plain is not given
        assert {type(n) for n in plain} == {int}
    for wrong in (True, False, -1, 10, 1.0, None, "1", 1 << 63, 1 << 70, np.bool_(True), [1]):
        for length in (3, 200):
            error = fault(check_prompt_ids, "p", [*ids[: length - 1], wrong], 9)
            assert error.field == f"p[{length - 1}]" and error.value is wrong
    assert check_prompt_ids("p", [], 9) == []
    assert fault(check_prompt_ids, "p", "12", 9).field == "p"


def test_long_values_are_truncated():
    assert len(str(fault(check_int, "x", "y" * 10_000, 0))) < 200


def test_long_values_are_truncated_and_long_lists_counted():
    assert str(invalid_value("x", "a" * 1000, "short")) == f"x is '{'a' * 76}...; it must be short"
    assert str(invalid_value("x", [1] * 81, "short")) == "x is a list of 81; it must be short"
    assert str(invalid_value("x", [1, 2], "short")) == "x is [1, 2]; it must be short"


def test_every_invalid_input_error_has_a_field() -> None:
    """An InvalidInputError is created with `field=`, except where a path is added later."""
    added_later = {
        "libllaisys/library.py",  # of the native library: its callers checked what users set
        "server/anthropic/schemas.py",
        "server/schemas/base.py",
        "server/schemas/chat.py",
    }
    package = Path(llaisys.__file__).parent
    made, without = InvalidInputError.__name__, set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_made = isinstance(node, ast.Call) and getattr(node.func, "id", "") == made
            # None: `**fields` of another error
            if is_made and not {"field", None} & {keyword.arg for keyword in node.keywords}:
                without.add(path.relative_to(package).as_posix())
    assert without == added_later


def test_with_prefix_keeps_the_fields_of_an_error() -> None:
    error = invalid_value("n", 129, "at most 128", code="too_many").with_prefix("jobs.jsonl:3: ")
    assert str(error) == "jobs.jsonl:3: n is 129; it must be at most 128"
    assert (error.field, error.value, error.limit) == ("n", 129, "at most 128")
    assert error.code == "too_many"
