"""guidance's class for vLLM, which sends its grammars in Lark."""

from __future__ import annotations

import json
import re
from typing import Any

import guidance
from guidance import assistant, gen, select, user
from guidance.models.experimental import VLLMModel
from openai_tools import Town
from runner import run
from script import ASK_COUNT, ASK_TOWN, COUNT, HELLO, KEY, MODEL, TOWN


def ask(url: str, question: str, grammar: Any) -> Any:
    """The model after its answer."""
    model = VLLMModel(MODEL, base_url=f"{url}/v1", api_key=KEY, echo=False)
    with user():
        model += question
    with assistant():
        model += grammar
    return model


def answer(url: str, question: str, grammar: Any) -> str:
    """What `grammar` captures as "found" in the answer."""
    return str(ask(url, question, grammar)["found"])


def chat(url: str) -> None:
    assert answer(url, "Hi", gen(name="found")) == HELLO
    few = answer(url, ASK_COUNT, gen(name="found", max_tokens=5))
    assert few and len(few) <= 20 and COUNT.startswith(few)


def choices(url: str) -> None:
    assert answer(url, ASK_COUNT, select(["nine ten", "one two"], name="found")) == "one two"
    # The model would say something else.
    assert answer(url, "Hi", select(["apple", "pear"], name="found")) in ("apple", "pear")


def regex(url: str) -> None:
    found = answer(url, ASK_COUNT, gen(name="found", regex="one two [a-z]{5}"))
    assert found == "one two three"
    found = answer(url, "Hi", "Call " + gen(name="found", regex="[0-9]{3}-[0-9]{2}") + " now.")
    assert re.fullmatch("[0-9]{3}-[0-9]{2}", found)


def stop(url: str) -> None:
    # The grammar ends with the stop text. guidance 0.3 does not match that and captures nothing.
    said = str(ask(url, ASK_COUNT, gen(name="found", stop=" four")))
    assert "one two three four" in said and "five" not in said


def structured(url: str) -> None:
    found = answer(url, ASK_TOWN, guidance.json(name="found", schema=Town))
    assert json.loads(found) == TOWN


SCENARIOS = ("chat", "choices", "regex", "stop", "structured")
run({k: globals()[k] for k in SCENARIOS})
