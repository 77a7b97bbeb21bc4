"""Random and hostile grammars are accepted or rejected within their limits; the engine survives."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from error_helpers import invalid_input
from model_files import tiny_config, write_hf_model

from llaisys import LLM, SamplingParams
from llaisys.common.errors import InvalidInputError
from llaisys.engine.structured import matching

SEEDS = range(24)
# CPU time of the two compilations, with slack for a busy machine.
MOST_SECONDS = 60.0


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("hostile") / "model"
    write_hf_model(path, tiny_config())
    with LLM(str(path), max_model_len=128) as llm:
        yield llm


def regex(rng: random.Random, depth: int = 6) -> str:
    """Nested repetition, alternation and counts, which cause catastrophic patterns."""
    if depth == 0:
        return rng.choice(["a", ".", "[^x]", r"\w", r"\p{L}", "(?:)", "é", "\\x00", "[\\s\\S]"])
    inner = regex(rng, depth - 1)
    return rng.choice(
        [
            f"({inner})*",
            f"({inner}+)+",
            f"({inner}){{{rng.randint(0, 3)},{rng.randint(3, 1000)}}}",
            f"({inner}|{regex(rng, depth - 1)})",
            f"({inner}{regex(rng, depth - 1)})?",
            f"(?={inner})",
        ]
    )


def schema(rng: random.Random, depth: int = 5) -> Any:
    """Unions of intersections of references, with absurd bounds."""
    if depth == 0:
        huge = 10 ** rng.randint(1, 30)
        return rng.choice(
            [
                {"type": "string", "minLength": huge % 10**9, "pattern": "(a|aa)+$"},
                {"type": "integer", "multipleOf": rng.randint(2, 10**6), "minimum": huge},
                {"type": "number", "exclusiveMinimum": 1e308},
                {"type": "array", "minItems": 10**9, "uniqueItems": True},
                {"$ref": "#/$defs/b"},
                {"$ref": "http://example.org/schema"},
                {"enum": [[[]] * 50, {"": {}}, "\ud83d\ude00" * 50]},
                {"type": ["string", 5]},
                {"const": None, "not": {"const": None}},
            ]
        )
    many = [schema(rng, depth - 1) for _ in range(rng.randint(1, 4))]
    made: dict[str, Any] = {rng.choice(["anyOf", "allOf", "oneOf", "prefixItems"]): many}
    if rng.random() < 0.5:
        made["properties"] = {f"p{i}": part for i, part in enumerate(many)}
        made["patternProperties"] = {regex(rng, 2): {}}
    if depth == 5:
        made["$defs"] = {"b": {"allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#"}]}}
    return made


def grammar(rng: random.Random) -> str:
    """Rules that reference each other, themselves, and undefined rules."""
    names = [f"r{i}" for i in range(rng.randint(1, 40))]
    rules = []
    for name in ["root", *names]:
        parts = [
            rng.choice([rng.choice(names), '"a"', "[a-z]{0,500}", "(r0 r0)*", '""', "missing"])
            for _ in range(rng.randint(1, 6))
        ]
        rules.append(f"{name} ::= " + rng.choice([" ", " | "]).join(parts))
    return "\n".join(rules)


def hostile(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    kind = ("regex", "json", "grammar")[seed % 3]
    return {kind: {"regex": regex, "json": schema, "grammar": grammar}[kind](rng)}


@pytest.mark.parametrize("seed", SEEDS)
def test_random_grammar_is_accepted_or_rejected_in_time(llm: LLM, seed: int) -> None:
    form = hostile(seed)
    start = time.monotonic()
    try:
        params = SamplingParams(structured_outputs=form, max_tokens=12, seed=seed, temperature=1)
        choice = llm.generate(["x"], params)[0].outputs[0]
        assert choice.finish_reason in ("stop", "length", "error"), json.dumps(form)[:500]
    except InvalidInputError as error:
        assert (error.field or "").startswith("structured_outputs"), (error, form)
    assert time.monotonic() - start < MOST_SECONDS
    fine = SamplingParams(structured_outputs={"choice": ["fine"]}, max_tokens=20)
    assert llm.generate(["x"], fine)[0].outputs[0].text == "fine"


def test_intersections_of_counted_repetitions_are_rejected(llm: LLM) -> None:
    """A set of states for each of many counted repetitions."""
    form = {"grammar": "start: A\nA: " + " & ".join(f"/(.{{0,{900 + i}}}a.*)/" for i in range(12))}
    with invalid_input("structured_outputs.grammar"):
        llm.generate(["x"], SamplingParams(structured_outputs=form, max_tokens=5))


def test_limits_match_the_documentation() -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "structured_output.md"
    text = page.read_text()
    trial = f"compilation and {matching.TRIAL_TOKENS} trial tokens"
    assert f"| {trial} | {matching.COMPILE_SECONDS:g} s of CPU time, 512 MiB" in text
    assert matching.EXTRA_MEMORY == 512 << 20
    assert f"| a mask in the trial | {1e3 * matching.MASK_SECONDS:g} ms" in text
    assert f"| a mask of an answer | {matching.LATER_MASK_SECONDS:g} s" in text
