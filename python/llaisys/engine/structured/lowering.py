"""Translate `StructuredOutputs` to a grammar of llguidance. Runs in a grammar process."""

from __future__ import annotations

import json
import re
from typing import Any

from llaisys.common.closed_schema import closed
from llaisys.common.structured import StructuredOutputs

# Between the tokens of a JSON text; bounded, because models can repeat white space forever.
WHITE_SPACE = r"[\x20\x0A\x09]{1,16}"
ANY_OBJECT = {"type": "object"}


class GrammarError(Exception):
    """The constraint is invalid; the text has the reason."""


def lower(spec: StructuredOutputs) -> str:
    """Return the grammar; raises GrammarError."""
    kind = spec.constraint
    value = getattr(spec, kind)
    if kind == "json_object":
        return _schema(ANY_OBJECT, spec)
    if kind == "json":
        return _schema(json.loads(value), spec)
    if kind == "regex":
        return json.dumps({"grammars": [{"lark_grammar": f"start: /{_pattern(value)}/"}]})
    if kind == "choice":
        return _lark("start: " + " | ".join(json.dumps(t, ensure_ascii=False) for t in value))
    if kind == "grammar":
        return _lark(_as_lark(value))
    return _lark(_structural_tag(json.loads(value), spec))


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _schema(schema: Any, spec: StructuredOutputs) -> str:
    return json.dumps({"grammars": [{"json_schema": _with_options(schema, spec)}]})


def _with_options(schema: Any, spec: StructuredOutputs) -> Any:
    """Add the options of `spec` to a schema; x-guidance options inside it are replaced."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options: dict[str, Any] = {"lenient": spec.lenient, "coerce_one_of": spec.lenient}
    if spec.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = spec.whitespace_pattern or WHITE_SPACE
    if spec.disable_additional_properties is not False:
        schema = closed(schema, every=bool(spec.disable_additional_properties))
    return {**schema, "x-guidance": options}


def _pattern(regex: str) -> str:
    """Return the pattern without anchors: it matches whole answers."""
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


def _structural_tag(tag: dict[str, Any], spec: StructuredOutputs) -> str:
    """Free text in which a trigger starts one of the structures, as in vLLM."""
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
        body = f"%json {json.dumps(_with_options(schema, spec))}"
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
