"""instructor in every mode of the protocols that the server has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import instructor
from anthropic import Anthropic
from instructor import Mode
from openai import OpenAI
from openai_tools import Town, ask
from runner import run
from script import ASK_TOWN, KEY, MODEL, TOWN


def openai_client(url: str, mode: Mode) -> Any:
    api = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    return instructor.from_openai(api, mode=mode)


def anthropic_client(url: str, mode: Mode) -> Any:
    api = Anthropic(base_url=url, api_key=KEY, max_retries=0)
    return instructor.from_anthropic(api, mode=mode)


def extract(client: Any, model: Any = Town, **fields: Any) -> Any:
    return client.create(
        model=MODEL, messages=ask(ASK_TOWN), response_model=model, max_retries=0, **fields
    )


def structured(url: str) -> None:
    for mode in (Mode.JSON, Mode.JSON_O1, Mode.MD_JSON, Mode.JSON_SCHEMA):
        town = extract(openai_client(url, mode))
        assert town.model_dump() == TOWN, mode  # it is of a class made of Town


def forced(url: str) -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.FUNCTIONS):
        assert extract(openai_client(url, mode)).model_dump() == TOWN, mode


def parallel(url: str) -> None:
    (town,) = extract(openai_client(url, Mode.PARALLEL_TOOLS), Iterable[Town])
    assert town.model_dump() == TOWN


def responses(url: str) -> None:
    assert extract(openai_client(url, Mode.RESPONSES_TOOLS)).model_dump() == TOWN
    client = openai_client(url, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS)
    assert extract(client, tools=[{"type": "web_search"}]).model_dump() == TOWN


def messages(url: str) -> None:
    for mode in (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON, Mode.ANTHROPIC_REASONING_TOOLS):
        town = extract(anthropic_client(url, mode), max_tokens=200)
        assert town.model_dump() == TOWN, mode
    client = anthropic_client(url, Mode.ANTHROPIC_PARALLEL_TOOLS)
    (town,) = extract(client, Iterable[Town], max_tokens=200)
    assert town.model_dump() == TOWN


SCENARIOS = ("structured", "forced", "parallel", "responses", "messages")
run({k: globals()[k] for k in SCENARIOS})
