"""Objects of a schema are closed where nothing else may add properties to them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llaisys.common.closed_schema import closed
from llaisys.common.structured import StructuredOutputs
from llaisys.engine.structured.matching import lower

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED_A = {**A, "additionalProperties": False}
OPEN_A = {**A, "additionalProperties": True}
REF = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (A, CLOSED_A),
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, "additionalProperties": False}),
        (OPEN_A, OPEN_A),
        ({**A, "unevaluatedProperties": True}, {**A, "unevaluatedProperties": True}),
        ({"type": "object"}, {"type": "object"}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"allOf": [A, A]}, {"allOf": [A, A]}),
        ({**A, "allOf": [{"required": ["b"]}]}, {**A, "allOf": [{"required": ["b"]}]}),
        ({"$defs": {"a": A}, "items": REF}, {"$defs": {"a": CLOSED_A}, "items": REF}),
        ({"$defs": {"a": A}, "allOf": [REF]}, {"$defs": {"a": A}, "allOf": [REF]}),
        ({"not": A, "if": A}, {"not": A, "if": A}),
        # Data is not a schema.
        ({"enum": [A], "default": A, "const": A}, {"enum": [A], "default": A, "const": A}),
        (True, True),
    ],
)
def test_closed(schema: Any, wanted: Any) -> None:
    assert closed(schema) == wanted
    assert closed(wanted) == wanted


def test_every_object_can_be_closed() -> None:
    assert closed({"type": "object"}, every=True)["additionalProperties"] is False
    assert closed(OPEN_A, every=True) == OPEN_A


def test_properties_are_not_mistaken_for_keywords() -> None:
    schema = {"properties": {"properties": A, "items": A, "type": {"type": "string"}}}
    parts = closed(schema)["properties"]
    assert parts == {"properties": CLOSED_A, "items": CLOSED_A, "type": {"type": "string"}}


@pytest.mark.parametrize(("setting", "is_closed"), [(None, True), (True, True), (False, False)])
def test_setting(setting: bool | None, is_closed: bool) -> None:
    spec = StructuredOutputs(json=A, disable_additional_properties=setting)
    schema = json.loads(lower(spec))["grammars"][0]["json_schema"]
    assert (schema.get("additionalProperties") is False) == is_closed
