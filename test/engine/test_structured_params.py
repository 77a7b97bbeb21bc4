"""StructuredOutputs: values, validation and wire format."""

from __future__ import annotations

import json

import pytest
from scheduler_helpers import make_scheduler

from llaisys import SamplingParams, StructuredOutputs
from llaisys.common.errors import InvalidInputError
from llaisys.common.request import Request
from llaisys.common.structured import MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH
from llaisys.common.types import ModelInfo
from llaisys.engine.admission import Admission
from llaisys.engine.structured.requests import GrammarFaultError, StructuredRequests

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
EXAMPLES = [
    {"json": SCHEMA},
    {"json": True},
    {"json_object": True},
    {"regex": "[0-9]+"},
    {"choice": ["yes", "no"]},
    {"grammar": 'root ::= "a"'},
    {"structural_tag": {"structures": [], "triggers": []}},
    {"json": SCHEMA, "lenient": True, "whitespace_pattern": " ?"},
]


@pytest.mark.parametrize("given", EXAMPLES, ids=str)
def test_survives_the_wire_and_plain_data(given):
    params = SamplingParams(structured_outputs=StructuredOutputs(**given))
    assert SamplingParams(structured_outputs=given) == params
    assert SamplingParams.from_wire(json.loads(json.dumps(params.to_wire()))) == params
    assert SamplingParams(**json.loads(json.dumps(params.to_dict()))) == params
    assert hash(params.structured_outputs) == hash(StructuredOutputs(**given))


def test_a_schema_is_the_same_as_object_and_as_text():
    assert StructuredOutputs(json=SCHEMA) == StructuredOutputs(json=json.dumps(SCHEMA))


def test_mapping_may_have_unused_fields():
    params = SamplingParams(structured_outputs={"regex": "a", "json": None, "choice": None})
    assert params.structured_outputs.constraint == "regex"


def nested(depth):
    schema = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "structured_outputs"),
        ({"lenient": True}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs.regex"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": "a" * 20_000}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a", 1]}, "structured_outputs.choice[1]"),
        ({"choice": ["a" * 4000 + str(i) for i in range(100)]}, "structured_outputs.choice"),
        ({"grammar": 5}, "structured_outputs.grammar"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": "[" * 5000}, "structured_outputs.json"),
        ({"json": [1]}, "structured_outputs.json"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json"),
        ({"json": {"const": "x" * MAX_SCHEMA_CHARS}}, "structured_outputs.json"),
        ({"json": nested(MAX_SCHEMA_DEPTH + 1)}, "structured_outputs.json"),
        ({"structural_tag": True}, "structured_outputs.structural_tag"),
        ({"unknown": 1}, "structured_outputs.unknown"),
        (7, "structured_outputs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_constraints_are_rejected_by_name(given, field):
    with pytest.raises(InvalidInputError) as caught:
        SamplingParams(structured_outputs=given)
    assert caught.value.field == field


def test_a_schema_may_be_as_deep_as_the_limit():
    assert StructuredOutputs(json=nested(MAX_SCHEMA_DEPTH)).constraint == "json"


def test_grammar_process_fault_is_logged_with_its_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    info = ModelInfo("p", "mock", 10, 64, (), 1, 16)  # no tokenizer: no process can be started
    grammars = StructuredRequests(info, 4)
    admission = Admission(make_scheduler(), [grammars], grammars.start)
    params = SamplingParams(structured_outputs={"choice": ["x"]})
    admission.add([Request("a", [1], params), Request("a#1", [1], params)], None)
    [(_, error)] = admission.poll()
    assert isinstance(error, GrammarFaultError) and not admission.is_busy
    assert "requests ['a', 'a#1']: structured output: " in caplog.text
