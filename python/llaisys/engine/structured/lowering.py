"""From what a request says to a grammar of llguidance. Runs in a grammar's own process only."""

from __future__ import annotations

import json
import re
from typing import Any

from llaisys.common.structured import StructuredOutputs

# Between the parts of a JSON text. Not any number of spaces: a model that falls into white space
# would never come out of it.
WHITE_SPACE = r"[\x20\x0A\x09]{1,16}"
ANY_OBJECT = {"type": "object"}


class GrammarError(Exception):
    """The constraint cannot be understood; the text says why."""


def lower(wanted: StructuredOutputs) -> str:
    """The grammar; raises GrammarError."""
    kind = wanted.constraint
    value = getattr(wanted, kind)
    if kind == "json_object":
        return _schema(ANY_OBJECT, wanted)
    if kind == "json":
        return _schema(json.loads(value), wanted)
    if kind == "regex":
        return json.dumps({"grammars": [{"lark_grammar": f"start: /{_pattern(value)}/"}]})
    if kind == "choice":
        return _lark("start: " + " | ".join(json.dumps(t, ensure_ascii=False) for t in value))
    if kind == "grammar":
        return _lark(_as_lark(value))
    return _lark(_structural_tag(json.loads(value), wanted))


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _schema(schema: Any, wanted: StructuredOutputs) -> str:
    return json.dumps({"grammars": [{"json_schema": _with_options(schema, wanted)}]})


def _with_options(schema: Any, wanted: StructuredOutputs) -> Any:
    """The schema with what is said beside it; options inside it (x-guidance) are not taken."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options: dict[str, Any] = {"lenient": wanted.lenient, "coerce_one_of": wanted.lenient}
    if wanted.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = wanted.whitespace_pattern or WHITE_SPACE
    if wanted.disable_additional_properties:
        schema = _closed(schema)
    return {**schema, "x-guidance": options}


def _closed(schema: Any) -> Any:
    """Every object schema that says nothing of other properties forbids them."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if schema.get("type") == "object" and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


def _pattern(regex: str) -> str:
    """A pattern that matches whole answers; anchors at its ends say what is so anyway."""
    from llguidance import regex_to_lark

    bare = regex.removeprefix("^")
    if bare.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$$", bare):
        bare = bare[:-1]
    return str(regex_to_lark(bare, "d"))


def _as_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply") from None
    except Exception as error:
        raise GrammarError(f"neither Lark nor GBNF: {error}") from None


def _structural_tag(tag: dict[str, Any], wanted: StructuredOutputs) -> str:
    """Free text in which a trigger begins one of the structures: vLLM's form of it."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise GrammarError('it must have "structures" and "triggers", two lists')
    if not structures:
        raise GrammarError("structures is empty; it must have at least one")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise GrammarError("triggers must be strings that are not empty")
    rules = [r"TAG_TEXT: /(.|\n)*/"]
    for number, structure in enumerate(structures):
        begin, end, schema = _structure(number, structure)
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise GrammarError(f"structures[{number}].begin starts with none of the triggers")
        body = f"%json {json.dumps(_with_options(schema, wanted))}"
        rest = _literal(begin[len(trigger) :])
        rules.append(f"trigger_{number}[lazy]: TAG_TEXT {_literal(trigger)}")
        rules.append(f"tag_{number}: trigger_{number} {rest} {body} {_literal(end)}")
    tags = " | ".join(f"tag_{number}" for number in range(len(structures)))
    return "\n".join([f"start: ({tags})* tag_end", "tag_end: TAG_TEXT", *rules])


def _structure(number: int, structure: Any) -> tuple[str, str, Any]:
    name = f"structures[{number}]"
    if not isinstance(structure, dict):
        raise GrammarError(f"{name} must be an object with begin, schema and end")
    begin, end, schema = (structure.get(key) for key in ("begin", "end", "schema"))
    if not isinstance(begin, str) or not isinstance(end, str):
        raise GrammarError(f"{name}.begin and {name}.end must be strings")
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"{name}.schema must be an object")
    return begin, end, schema


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
